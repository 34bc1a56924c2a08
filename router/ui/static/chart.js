// Line charts over time, in SVG: their colors follow the theme.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { clock, ms, shortMs } from "./format.js";

const LEFT = 58;
const RIGHT = 8;
const TOP = 14;
const BOTTOM = 22;
const X_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600]; // seconds
const X_SPACE = 70; // pixels between two labels, at least
const Y_SPACE = 34;

// The time that the pointer is at, in all charts.
const pointed = new Set();
let pointer = null;

function point(time) {
  pointer = time;
  for (const show of pointed) show(time);
}

function usePointer() {
  const [time, set] = useState(pointer);
  useEffect(() => {
    pointed.add(set);
    return () => pointed.delete(set);
  }, []);
  return time;
}

function useWidth(box) {
  const [width, set] = useState(400);
  useLayoutEffect(() => {
    const look = () => set(box.current.clientWidth || 400);
    const sized = new ResizeObserver(look);
    sized.observe(box.current);
    look();
    return () => sized.disconnect();
  }, []);
  return width;
}

// Multiples of 1, 2 or 5 times a power of ten, from 0 up to `most`.
function ticksUpTo(most, number) {
  const rough = most / Math.max(number, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => at * step);
}

function timesBetween(begin, end, number) {
  const step = X_STEPS.find((one) => (end - begin) / one <= number) ?? X_STEPS.at(-1);
  const shift = new Date(1e3 * end).getTimezoneOffset() * 60; // whole hours are those of clocks here
  const first = Math.ceil((begin - shift) / step) * step + shift;
  return Array.from({ length: Math.max(0, Math.floor((end - first) / step) + 1) }, (_, at) => first + at * step);
}

// The line through the values that are there. One without neighbours is a dot.
function pathOf(times, values, x, y, from) {
  let path = "";
  for (let at = from; at < times.length; at++) {
    if (values[at] == null) continue;
    const place = `${x(times[at]).toFixed(1)},${y(values[at]).toFixed(1)}`;
    const begins = at === from || values[at - 1] == null;
    path += `${begins ? "M" : "L"}${place}`;
    if (begins && values[at + 1] == null) path += "h.01";
  }
  return path;
}

function areaOf(times, values, x, y, from) {
  const there = times.map((_, at) => at).filter((at) => at >= from && values[at] != null);
  if (!there.length) return "";
  const [first, last] = [there[0], there.at(-1)].map((at) => x(times[at]).toFixed(1));
  const line = there.map((at) => `L${x(times[at]).toFixed(1)},${y(values[at]).toFixed(1)}`).join("");
  return `M${first},${y(0)}${line}L${last},${y(0)}Z`;
}

// The marks in sight, with places for their labels that do not cover each other.
function placed(marks, x, width) {
  let end = -Infinity; // of the label before
  let row = 0;
  return marks.map((mark) => ({ ...mark, at: x(mark.time) })).filter(({ at }) => at >= LEFT && at <= width - RIGHT).map((mark) => {
    const wide = 6.3 * mark.label.length; // pixels, about
    const left = Math.max(LEFT, Math.min(mark.at + 4, width - RIGHT - wide));
    row = left < end ? row + 1 : 0;
    end = left + wide + 6;
    return { ...mark, left, row };
  });
}

const paint = ({ color, strength = 100 }) => `color-mix(in srgb, var(--${color}) ${strength}%, var(--panel))`;

// `times`: seconds since the epoch. `series`: {label, color (a CSS variable's name), strength (of it,
// %), values, dash, width, fill, group, which}; values may be null. Lines of one `group` share an entry of the legend,
// which tells them apart by `which`. `marks`: {time, label} of vertical lines. `span`: seconds that
// the axis shows. `most`: the upper end of the other one.
export function Chart({ title, note, times, series, marks = [], height = 190, format = String, span = 600, most }) {
  const box = useRef();
  const width = useWidth(box);
  const time = usePointer();
  const end = times.at(-1) ?? Date.now() / 1e3;
  const begin = end - span;
  const from = Math.max(0, times.findIndex((one) => one >= begin));
  const highest = series.reduce((high, { values }) => values.reduce((high, value, at) => (at >= from && value > high ? value : high), high), 0);
  const top = most ?? (highest > 0 ? 1.1 * highest : 1);
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - begin)) / span;
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);

  const near = time == null ? -1 : times.reduce((best, one, at) => (at >= from && Math.abs(one - time) < Math.abs((times[best] ?? Infinity) - time) ? at : best), -1);
  const at = near >= 0 ? near : times.length - 1;
  const shown = (values) => (values[at] == null ? "–" : format(values[at]));
  const moved = ({ clientX }) => {
    const place = clientX - box.current.getBoundingClientRect().left;
    point(begin + (span * (place - LEFT)) / (width - LEFT - RIGHT));
  };
  const groups = new Map(); // entries of the legend
  for (const line of series) {
    const name = line.group ?? line.label;
    groups.set(name, [...(groups.get(name) ?? []), line]);
  }
  return html`<figure class="chart" aria-label=${`${title}: ${series.map(({ label, values }) => `${label} ${shown(values)}`).join(", ")}`}>
    <figcaption>
      <h3>${title}</h3>
      ${note && html`<span class="note">${note}</span>`}
      <ul class="legend">
        ${[...groups].map(
          ([name, lines]) =>
            html`<li key=${name}>
              ${lines[0].which && name}
              ${lines.map((line) => html`<span key=${line.label}>
                <svg class="key" aria-hidden="true" width="27" height="8"><path class="chart-line" d="M2,4H22" stroke-width="2" stroke-dasharray=${line.dash?.join(" ")} style=${{ stroke: paint(line) }} /></svg>
                ${line.which ?? name} <b class="num">${shown(line.values)}</b>
              </span>`)}
            </li>`,
        )}
      </ul>
    </figcaption>
    <div ref=${box} class="chart-box" style=${{ height: `${height}px` }}>
      <svg width=${width} height=${height} aria-hidden="true" onPointerMove=${moved} onPointerLeave=${() => point(null)}>
        ${ticksUpTo(top, (height - TOP - BOTTOM) / Y_SPACE).map(
          (tick) => html`<g key=${tick}>
            <line class="chart-grid" x1=${LEFT} x2=${width - RIGHT} y1=${y(tick)} y2=${y(tick)} />
            <text x=${LEFT - 8} y=${y(tick) + 4} text-anchor="end">${(format === ms ? shortMs : format)(tick)}</text>
          </g>`,
        )}
        ${timesBetween(begin, end, (width - LEFT - RIGHT) / X_SPACE).filter((tick) => x(tick) < width - X_SPACE / 2.6).map(
          (tick) => html`<text key=${tick} x=${x(tick)} y=${height - 5} text-anchor="middle">${clock(tick).slice(0, tick % 60 ? 8 : 5)}</text>`,
        )}
        ${series.map(({ label, values, fill }) => fill && html`<path key=${`${label} area`} d=${areaOf(times, values, x, y, from)} style=${{ fill: `var(--${fill})` }} />`)}
        ${series.map(
          (line) => html`<path key=${line.label} class="chart-line" d=${pathOf(times, line.values, x, y, from)}
            stroke-width=${line.width ?? 1.75} stroke-dasharray=${line.dash?.join(" ")} style=${{ stroke: paint(line) }} />`,
        )}
        ${placed(marks, x, width).map(
          ({ time, label, at, left, row }) => html`<g key=${time} class="chart-mark">
            <line x1=${at} x2=${at} y1=${TOP - 6} y2=${height - BOTTOM} />
            <text x=${left} y=${TOP + 5 + 13 * row}>${label}</text>
          </g>`,
        )}
        ${near >= 0 &&
        html`<g>
          <line class="chart-pointer" x1=${x(times[near])} x2=${x(times[near])} y1=${TOP} y2=${height - BOTTOM} />
          <text class="chart-when" x=${Math.min(x(times[near]), width - 30)} y=${height - 5} text-anchor="middle">${clock(times[near])}</text>
          ${series.map((line) => line.values[near] != null && html`<circle key=${line.label} r="3" cx=${x(times[near])} cy=${y(line.values[near])} style=${{ fill: paint(line) }} />`)}
        </g>`}
      </svg>
    </div>
  </figure>`;
}
