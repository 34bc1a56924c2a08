// Numbers as people read them.

const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// A number with three digits that count: 0.123, 12.3, 1,234, 12.3k, 4.56M.
export function count(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${SMALL.format(value / 1e9)}G`;
  if (size >= 1e6) return `${SMALL.format(value / 1e6)}M`;
  if (size >= 1e4) return `${SMALL.format(value / 1e3)}k`;
  return size >= 100 || Number.isInteger(value) ? WHOLE.format(value) : SMALL.format(value);
}

// A duration given in milliseconds.
export function ms(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size < 1 && size > 0) return `${SMALL.format(value * 1e3)} µs`;
  if (size < 1000) return `${size < 100 ? SMALL.format(value) : WHOLE.format(value)} ms`;
  if (size < 60_000) return `${SMALL.format(value / 1e3)} s`;
  const minutes = Math.floor(value / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor((value % 60_000) / 1e3)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// The same, shorter, for axes.
export function shortMs(value) {
  return value < 60_000 ? ms(value) : `${SMALL.format(value / 60_000)} min`;
}

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(value) >= 1000 && at < units.length - 1) {
    value /= 1000;
    at++;
  }
  return `${SMALL.format(value)} ${units[at]}`;
}

export function percent(share) {
  return share == null ? "–" : `${SMALL.format(100 * share)} %`;
}

// How long ago a time in seconds since the epoch is.
export function ago(seconds, now = Date.now() / 1e3) {
  return seconds == null ? "–" : `${ms(1e3 * Math.max(0, Math.floor(now - seconds)))} ago`;
}

// The time of day of seconds since the epoch.
export function clock(seconds) {
  return new Date(1e3 * seconds).toLocaleTimeString("en-GB");
}
