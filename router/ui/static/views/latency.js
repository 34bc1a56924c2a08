// Latencies, throughput and goodput by strategy generation; a swap is a line in the charts.
import { ago, count, ms, percent } from "../format.js";
import { html, useMemo, useState } from "../lib.js";
import { slo, useLive } from "../live.js";
import { Badge, Card, Chart, Empty, Field, Table } from "../parts.js";

const LINES = 3; // generations with lines of their own: those with the latest requests
const COLORS = ["accent", "line-2", "line-3"];
const PERCENTILES = { p50: [70, [2, 4]], p90: [85, [7, 4]], p99: [100] }; // strength of color (%), dashes
const LEAST_SPAN_S = 60;
const SPAN_S = 600;

const METRICS = [
  ["ttft_ms", "Time to first token", "TTFT"],
  ["tpot_ms", "Time per output token", "TPOT, from the first token to the last"],
  ["jct_ms", "Job completion time", "JCT, from arrival to the end"],
];

// The generations that have lines, by number: {generation, strategy, color}.
function generationsOf(ring) {
  const known = new Map();
  for (const { latency, active, canary } of ring) {
    for (const { generation, strategy } of [...latency, active, canary].filter(Boolean)) known.set(generation, strategy);
  }
  return [...known.entries()].sort(([a], [b]) => a - b).slice(-LINES).map(([generation, strategy]) => ({
    generation, strategy, color: generation % COLORS.length, name: `${strategy} · gen ${generation}`,
  }));
}

// The times at which another generation became active: {time, label}.
function swapsOf(ring) {
  return ring.flatMap(({ time, active }, at) => {
    const before = ring[at - 1]?.active;
    return before && before.generation !== active.generation ? [{ time, label: `gen ${active.generation} ${active.strategy}` }] : [];
  });
}

const of = (snapshot, generation) => snapshot.latency.find((one) => one.generation === generation);

function Objectives() {
  const [typed, type] = useState(slo.get);
  const field = (name, label) => html`<${Field} label=${label} type="number" min="0" step="any" inputmode="decimal" placeholder="any"
    value=${typed[name] ?? ""} onInput=${(event) => {
      const value = Number(event.target.value);
      const next = { ...typed, [name]: value > 0 ? value : null };
      type(next);
      slo.set(next);
    }} />`;
  return html`<div class="objectives">${field("ttft_ms", "TTFT objective (ms)")}${field("tpot_ms", "TPOT objective (ms)")}</div>`;
}

const withRate = (shown, perS) => html`${shown}<div class="note num">${count(perS)} /s</div>`;

const COLUMNS = [
  {
    key: "strategy", title: "Strategy",
    render: ({ strategy, generation, role, color }) => html`<span class="row"><i class="swatch" style=${{ background: `var(--${color})` }}></i><b>${strategy}</b> <small>gen ${generation}</small>
      ${role && html`<${Badge} tone=${role === "active" ? "good" : "accent"}>${role}</${Badge}>`}</span>`,
  },
  { key: "since", title: "Since", align: "right", render: ({ since }) => html`<span class="note num">${ago(since)}</span>` },
  { key: "requests", title: "Requests", align: "right", render: ({ requests, per_s }) => withRate(count(requests), per_s) },
  { key: "failed", title: "Failed", align: "right", render: ({ failed }) => (failed ? html`<b class="text-bad">${failed}</b>` : "0") },
  ...METRICS.flatMap(([key, , note]) => ["p50", "p99"].map((which) => ({
    key: `${key} ${which}`, title: `${note.split(",")[0]} ${which}`, align: "right", render: (row) => ms(row[key]?.[which]),
  }))),
  { key: "goodput", title: "Within SLO", align: "right", render: ({ goodput, goodput_per_s }) => withRate(percent(goodput), goodput_per_s) },
];

function Generations({ now }) {
  const roles = { [now.active.generation]: "active", ...(now.canary && { [now.canary.generation]: "canary" }) };
  const idle = [now.active, now.canary].filter((one) => one && !now.latency.some(({ generation }) => generation === one.generation));
  const rows = [...now.latency, ...idle.map((one) => ({ requests: 0, failed: 0, ...one }))]
    .map((one) => ({ ...one, per_s: one.requests / now.window_s, role: roles[one.generation], color: COLORS[one.generation % COLORS.length] }))
    .sort((a, b) => b.generation - a.generation);
  return html`<${Card} title="Generations" note=${`requests that ended in the last ${now.window_s} s`}>
    <${Table} label="Generations" columns=${COLUMNS} rows=${rows} rowKey=${({ generation }) => generation} />
  </${Card}>`;
}

function View() {
  const { now, ring } = useLive();
  const [shown, show] = useState(["p50", "p99"]);
  const generations = useMemo(() => generationsOf(ring), [ring]);
  if (!now) return html`<${Empty} title="Waiting for the router" />`;
  const times = ring.map(({ time }) => time);
  const span = Math.min(SPAN_S, Math.max(LEAST_SPAN_S, times.at(-1) - times[0]));
  const common = { times, span, marks: swapsOf(ring) };
  const many = generations.length > 1;
  const lines = (metric) => generations.flatMap(({ generation, color, name }) => shown.map((which) => ({
    label: `${name} ${which}`,
    group: many ? `gen ${generation}` : "",
    which,
    color: COLORS[color],
    strength: PERCENTILES[which][0],
    dash: PERCENTILES[which][1],
    values: ring.map((snapshot) => of(snapshot, generation)?.[metric][which] ?? null),
  })));
  const toggle = (which) => show(Object.keys(PERCENTILES).filter((one) => (one === which) !== shown.includes(one)));
  const objectives = [now.slo.ttft_ms && `TTFT ≤ ${ms(now.slo.ttft_ms)}`, now.slo.tpot_ms && `TPOT ≤ ${ms(now.slo.tpot_ms)}`].filter(Boolean);
  return html`
    <${Card} class="bar-card"><div class="row row-between">
      <${Objectives} />
      <div class="tabs" role="group" aria-label="Percentiles">
        ${Object.keys(PERCENTILES).map((which) => html`<button type="button" key=${which} aria-pressed=${shown.includes(which)} onClick=${() => toggle(which)}>${which}</button>`)}
      </div>
    </div></${Card}>
    <div class="columns">
      ${METRICS.map(([metric, title, note]) => html`<${Card} key=${metric}><${Chart} title=${title} note=${note} format=${ms} series=${lines(metric)} ...${common} /></${Card}>`)}
      <${Card}><${Chart} title="Goodput" note=${objectives.length ? objectives.join(", ") : "no objective: what did not fail"} format=${percent} most=${1.05}
        series=${generations.map(({ generation, color, name }) => ({ label: name, color: COLORS[color], values: ring.map((one) => of(one, generation)?.goodput ?? null) }))} ...${common} /></${Card}>
      <${Card}><${Chart} title="Requests" note=${`per second; ended: over ${now.window_s} s, by generation`} format=${count} series=${[
        ...generations.map(({ generation, color }) => ({
          label: many ? `gen ${generation}` : "ended", color: COLORS[color],
          values: ring.map((one) => { const its = of(one, generation); return its ? its.requests / one.window_s : null; }),
        })),
        { label: "arrived", color: "muted", dash: [3, 3], values: ring.map(({ requests }) => requests.begun_per_s) },
        { label: "failed", color: "bad", dash: [1, 4], width: 2.5, values: ring.map(({ requests }) => requests.failed_per_s) },
      ]} ...${common} /></${Card}>
      <${Card}><${Chart} title="Tokens" note="per second" format=${count} series=${[
        { label: "emitted", color: "decode", fill: "decode-soft", values: ring.map(({ requests }) => requests.tokens_per_s) },
      ]} ...${common} /></${Card}>
    </div>
    <${Generations} now=${now} />`;
}

export default { name: "latency", title: "Latency", View };
