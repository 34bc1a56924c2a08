// Line charts over time, on uPlot.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { themeChanges } from "./theme.js";
import { clock, ms, shortMs } from "./format.js";

const { uPlot } = globalThis;

// The color that a CSS variable has now, as canvas needs it.
function colorOf(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

// Draws a vertical line with a label at each of `marks`, {time, label}.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.strokeStyle = ctx.fillStyle = colorOf("accent");
  ctx.textAlign = "left";
  ctx.lineWidth = ratio;
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  let end = -Infinity; // of the label before, which the next one must not cover
  let row = 0;
  for (const { time, label } of marks) {
    const x = Math.round(plot.valToPos(time, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = ctx.measureText(label).width;
    const left = Math.min(x + 4 * ratio, bbox.left + bbox.width - width);
    row = left < end ? row + 1 : 0;
    end = left + width + 6 * ratio;
    ctx.fillText(label, left, bbox.top + (11 + 13 * row) * ratio);
  }
  ctx.restore();
}

// `times`: seconds since the epoch. `series`: {label, color (a CSS variable's name), values, dash,
// width, fill, group, which}; values may be null. Lines of one `group` share an entry of the legend,
// which tells them apart by `which`. `marks`: see `drawMarks`. `span`: seconds that the axis shows.
export function Chart({ title, note, times, series, marks = [], height = 190, format = String, span = 600, most }) {
  const box = useRef();
  const plot = useRef();
  const shownMarks = useRef(marks);
  const [at, setAt] = useState(null);
  const [theme, changed] = useState(0);
  shownMarks.current = marks;
  const shape = JSON.stringify(series.map(({ label, color, dash, width, fill }) => [label, color, dash, width, fill]));

  useEffect(() => themeChanges(() => changed((number) => number + 1)), []);

  useLayoutEffect(() => {
    const faint = colorOf("line");
    const axis = {
      stroke: colorOf("muted"),
      grid: { stroke: faint, width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const options = {
      width: box.current.clientWidth || 400,
      height,
      legend: { show: false },
      padding: [10, 8, 0, 0],
      cursor: { y: false, points: { size: 6 }, sync: { key: "time" }, drag: { x: false, y: false } },
      scales: { y: { range: (_, least, top) => [0, most ?? Math.max(1.1 * (top || 0), 1e-6)] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, tick % 60 ? 8 : 5)) },
        { ...axis, size: 58, space: 32, values: (_, ticks) => ticks.map((tick) => (format === ms ? shortMs : format)(tick)) },
      ],
      series: [
        {},
        ...series.map(({ label, color, dash, width = 1.75, fill }) => ({
          label,
          stroke: colorOf(color),
          width,
          dash,
          fill: fill && colorOf(fill),
          points: { show: false },
        })),
      ],
      hooks: {
        draw: [(drawn) => drawMarks(drawn, shownMarks.current)],
        setCursor: [(drawn) => setAt(drawn.cursor.idx ?? null)],
      },
    };
    plot.current = new uPlot(options, [[], ...series.map(() => [])], box.current);
    const sized = new ResizeObserver(() => {
      const { clientWidth } = box.current;
      if (clientWidth && clientWidth !== plot.current.width) plot.current.setSize({ width: clientWidth, height });
    });
    sized.observe(box.current);
    return () => {
      sized.disconnect();
      plot.current.destroy();
    };
  }, [shape, theme, height]);

  useLayoutEffect(() => {
    plot.current.setData([times, ...series.map(({ values }) => values)], false);
    const last = times.at(-1) ?? Date.now() / 1e3;
    plot.current.setScale("x", { min: last - span, max: last });
  });

  const point = at != null && at < times.length ? at : times.length - 1;
  const said = series.map(({ label, values }) => `${label} ${values[point] == null ? "none" : format(values[point])}`).join(", ");
  const groups = new Map(); // entries of the legend
  for (const line of series) {
    const name = line.group ?? line.label;
    groups.set(name, [...(groups.get(name) ?? []), line]);
  }
  return html`<figure class="chart" aria-label=${`${title}: ${said}`}>
    <figcaption>
      <h3>${title}</h3>
      ${note && html`<span class="note">${note}</span>`}
      <ul class="legend">
        ${[...groups].map(
          ([name, lines]) =>
            html`<li key=${name}>
              <i class="swatch" style=${{ background: `var(--${lines[0].color})` }}></i>${name}
              ${lines.map(({ label, which, values }) => html`<span key=${label}>${which} <b class="num">${values[point] == null ? "–" : format(values[point])}</b></span>`)}
            </li>`,
        )}
      </ul>
    </figcaption>
    <div ref=${box} class="chart-box" style=${{ height: `${height}px` }}></div>
  </figure>`;
}
