// What views are made of.
import { Chart } from "./chart.js";
import { html, useCallback, useEffect, useId, useLayoutEffect, useRef, useState } from "./lib.js";

export { Chart };

export const classes = (...names) => names.filter(Boolean).join(" ");

export function Card({ title, note, actions, class: extra, children }) {
  return html`<section class=${classes("card", extra)}>
    ${(title || actions) &&
    html`<header class="card-head">
      <div>${title && html`<h2>${title}</h2>`}${note && html`<p class="note">${note}</p>`}</div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>`}
    ${children}
  </section>`;
}

// Tones: neutral, accent, good, warn, bad, prefill, decode, put, queue.
export function Badge({ tone = "neutral", dot = false, title, children }) {
  return html`<span class=${`badge tone-${tone}`} title=${title}>
    ${dot && html`<i class="dot" aria-hidden="true"></i>`}${children}
  </span>`;
}

export function Button({ tone = "plain", busy = false, disabled, children, small, ...rest }) {
  return html`<button
    type="button"
    class=${classes("button", `button-${tone}`, small && "button-small")}
    disabled=${disabled || busy}
    aria-busy=${busy}
    ...${rest}
  >
    ${busy && html`<i class="spinner" aria-hidden="true"></i>`}${children}
  </button>`;
}

// A bar of segments `{label, value, tone}` out of `total`; a text says the same to those who do not
// see it.
export function Meter({ segments, total, label, legend = false, format = String }) {
  const shown = segments.filter((segment) => segment.value > 0);
  const said = shown.map(({ label, value }) => `${label} ${format(value)}`).join(", ");
  return html`<div class="meter-box">
    <div class="meter" role="img" aria-label=${`${label}: ${said || "empty"}`}>
      ${shown.map(
        ({ label, value, tone }) =>
          html`<i
            key=${label}
            class=${`seg-${tone}`}
            title=${`${label}: ${format(value)}`}
            style=${{ width: `${(100 * value) / Math.max(total, 1)}%` }}
          ></i>`,
      )}
    </div>
    ${legend &&
    html`<ul class="legend">
      ${shown.map(
        ({ label, value, tone }) =>
          html`<li key=${label}><i class=${`swatch seg-${tone}`}></i>${label} <b>${format(value)}</b></li>`,
      )}
    </ul>`}
  </div>`;
}

// A label with its input. `children` is a function of the input's attributes, or none for a text
// input that gets the rest of the attributes.
export function Field({ label, hint, error, wide, children, ...rest }) {
  const id = useId();
  const about = hint || error ? `${id}-about` : undefined;
  const attributes = { id, "aria-describedby": about, "aria-invalid": error ? "true" : undefined };
  return html`<div class=${classes("field", wide && "field-wide")}>
    <label for=${id}>${label}</label>
    ${typeof children === "function"
      ? children(attributes)
      : html`<input class="input" ...${attributes} ...${rest} />`}
    ${(error || hint) &&
    html`<p id=${about} class=${error ? "field-error" : "note"}>${error || hint}</p>`}
  </div>`;
}

export function Select({ options, ...rest }) {
  return html`<select class="input" ...${rest}>
    ${options.map((option) => {
      const [value, label] = Array.isArray(option) ? option : [option, option];
      return html`<option key=${value} value=${value}>${label}</option>`;
    })}
  </select>`;
}

export function Notice({ tone = "neutral", title, action, children }) {
  return html`<div class=${`notice tone-${tone}`} role=${tone === "bad" ? "alert" : "status"}>
    <div>${title && html`<strong>${title} </strong>`}${children}</div>
    ${action}
  </div>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><strong>${title}</strong>${children && html`<p>${children}</p>`}</div>`;
}

const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);

// `columns`: {key, title, align, render(row), class, by(row)}. The head of one with `by` is a button
// that sorts by this text or number, and the other way round if it is pressed again. A row that `href(row)` leads on is a link by
// its first cell, and takes clicks everywhere.
export function Table({ columns, rows, rowKey, href, empty = "Nothing here.", label, class: extra }) {
  const [{ key: first, turn }, sort] = useState({}); // turn: 1, or -1 from the greatest to the least
  const by = columns.find(({ key }) => key === first)?.by;
  const sorted = by ? [...rows].sort((a, b) => turn * compare(by(a), by(b))) : rows;
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${label}>
    <table class=${classes("table", extra)}>
      <thead>
        <tr>
          ${columns.map(
            ({ key, title, align, class: extra, by }) =>
              html`<th key=${key} scope="col" class=${classes(align && `align-${align}`, extra)}
                aria-sort=${by && (key !== first ? "none" : turn > 0 ? "ascending" : "descending")}>
                ${by ? html`<button type="button" class="sort" onClick=${() => sort({ key, turn: key === first ? -turn : 1 })}>${title}</button>` : title}
              </th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.length === 0 &&
        html`<tr><td class="table-empty" colspan=${columns.length}>${empty}</td></tr>`}
        ${sorted.map((row) => {
          const link = href?.(row);
          return html`<tr
            key=${rowKey(row)}
            class=${link && "row-link"}
            onClick=${link && ((event) => event.target.closest("a, button") || (location.hash = link))}
          >
            ${columns.map(({ key, align, render, class: extra }, at) => {
              const shown = render ? render(row) : row[key];
              return html`<td key=${key} class=${classes(align && `align-${align}`, extra)}>
                ${link && at === 0 ? html`<a href=${link}>${shown}</a>` : shown}
              </td>`;
            })}
          </tr>`;
        })}
      </tbody>
    </table>
  </div>`;
}

// A modal dialog. `onClose` is called on Escape and by its close button.
export function Dialog({ title, onClose, children, actions, wide }) {
  const box = useRef();
  const id = useId();
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return html`<dialog
    ref=${box}
    class=${classes("dialog", wide && "dialog-wide")}
    aria-labelledby=${id}
    onCancel=${(event) => {
      event.preventDefault();
      onClose?.();
    }}
    onClick=${(event) => event.target === box.current && onClose?.()}
  >
    <div class="dialog-body">
      <header class="dialog-head">
        <h2 id=${id}>${title}</h2>
        ${onClose && html`<button type="button" class="icon-button" aria-label="Close" onClick=${onClose}>×</button>`}
      </header>
      ${children}
      ${actions && html`<footer class="dialog-actions">${actions}</footer>`}
    </div>
  </dialog>`;
}

// One number with its name.
export function Stat({ label, value, unit, note, tone, children }) {
  return html`<div class="stat">
    <span class="stat-label">${label}</span>
    <span class=${classes("stat-value", tone && `text-${tone}`)}>${value}${unit && html`<small> ${unit}</small>`}</span>
    ${note && html`<span class="note">${note}</span>`}${children}
  </div>`;
}

export function Sparkline({ values, tone = "accent", label }) {
  const known = values.filter((value) => value != null);
  const most = Math.max(...known, 1e-9);
  const step = 100 / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => `${at * step},${24 - (22 * (value ?? 0)) / most}`);
  return html`<svg class=${`spark spark-${tone}`} viewBox="0 0 100 25" preserveAspectRatio="none" role="img" aria-label=${label}>
    <path class="spark-area" d=${`M0,25 L${points.join(" L")} L100,25 Z`} />
    <path class="spark-line" d=${`M${points.join(" L")}`} />
  </svg>`;
}

// Text next to a button that copies it.
export function Copyable({ text, children }) {
  const [copied, set] = useState(false);
  const copy = () =>
    navigator.clipboard?.writeText(text).then(() => {
      set(true);
      setTimeout(set, 1200, false);
    });
  return html`<span class="copyable">
    <code class="mono">${children ?? text}</code>
    <button type="button" class="icon-button" aria-label="Copy" title="Copy" onClick=${copy}>
      <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${copied ? "M5 13l4 4L19 7" : "M9 9h10v11H9zM6 15H5V4h10v2"} /></svg>
    </button>
  </span>`;
}

export function Tabs({ tabs, value, onChange, label }) {
  return html`<div class="tabs" role="group" aria-label=${label}>
    ${tabs.map(
      ([name, title]) =>
        html`<button key=${name} type="button" aria-pressed=${name === value} onClick=${() => onChange(name)}>${title}</button>`,
    )}
  </div>`;
}

// Runs something that takes time: {run, busy, error}. `run` resolves to undefined on failure.
export function useAction(work) {
  const [state, set] = useState({ busy: false, error: null });
  const latest = useRef(work);
  latest.current = work;
  const run = useCallback(async (...args) => {
    set({ busy: true, error: null });
    try {
      const result = await latest.current(...args);
      set({ busy: false, error: null });
      return result;
    } catch (error) {
      set({ busy: false, error });
      return undefined;
    }
  }, []);
  return { ...state, run };
}

// Resolves when the page is seen again, or after a while.
function visible() {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
    setTimeout(resolve, 60_000);
  });
}

// The width of an element in pixels: [ref, width].
export function useWidth() {
  const ref = useRef();
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const sized = new ResizeObserver(() => set(ref.current?.clientWidth ?? 0));
    sized.observe(ref.current);
    return () => sized.disconnect();
  }, []);
  return [ref, width];
}

// Calls `load(signal)` now and every `every` ms; null: once. `every` may be a function of what was
// loaded last. Returns {data, error, reload}.
export function usePolled(load, dependencies, every = null) {
  const [state, set] = useState({ data: null, error: null });
  const [turn, reload] = useState(0);
  useEffect(() => {
    const ended = new AbortController();
    let timer, last;
    const look = async () => {
      while (document.hidden && !ended.signal.aborted) await visible();
      if (ended.signal.aborted) return;
      try {
        const data = await load(ended.signal);
        last = data;
        if (!ended.signal.aborted) set({ data, error: null });
      } catch (error) {
        if (!ended.signal.aborted) set((before) => ({ ...before, error }));
      }
      const pause = typeof every === "function" ? every(last) : every;
      if (pause && !ended.signal.aborted) timer = setTimeout(look, pause);
    };
    look();
    return () => {
      ended.abort();
      clearTimeout(timer);
    };
  }, [...dependencies, turn]);
  return { ...state, reload: () => reload((number) => number + 1) };
}

// ---- short messages at the edge of the page

const toasts = new Set();

export function toast(text, tone = "good") {
  for (const show of toasts) show({ text, tone, id: Math.random() });
}

export function Toasts() {
  const [shown, set] = useState([]);
  useEffect(() => {
    const show = (message) => {
      set((all) => [...all.slice(-3), message]);
      setTimeout(() => set((all) => all.filter((one) => one !== message)), 5000);
    };
    toasts.add(show);
    return () => toasts.delete(show);
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map(({ id, text, tone }) => html`<div key=${id} class=${`toast tone-${tone}`}>${text}</div>`)}
  </div>`;
}
