// The traffic of the last minutes in virtual time, under the active strategy and another one.
import { call, eventsOf, ApiError } from "../api.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { count, ms, percent } from "../format.js";
import { slo } from "../live.js";
import { Badge, Button, Notice, Select, classes } from "../parts.js";

const SEEDS = 3;
const SPANS = [["5", "last 5 minutes"], ["15", "last 15 minutes"], ["60", "last hour"], ["1440", "last day"]];
// What is better: less (-1), more (1), neither (0).
const FIGURES = [
  ["TTFT, mean", "ttft_ms", ms, -1],
  ["TTFT, p99", "ttft_p99_ms", ms, -1],
  ["Time per output token", "tpot_ms", ms, -1],
  ["Request (JCT), mean", "jct_ms", ms, -1],
  ["Within the objectives", "attained", percent, 1],
  ["Requests completed", "completed", count, 1],
  ["Engines busy", "utilisation", percent, 0],
];
const LEAST_CHANGE = 0.005; // smaller ones are shown as none

export function Simulation({ candidate, stale, disabled }) {
  const [minutes, span] = useState("15");
  const [state, set] = useState({});
  const running = useRef(null);
  useEffect(() => () => running.current?.abort(), []);

  const run = async () => {
    const ended = (running.current = new AbortController());
    set({ progress: { done: 0, total: 2, candidate: "" } });
    try {
      const asked = candidate();
      const advice = await advise(asked, Number(minutes), ended.signal, (progress) => set({ progress }));
      set({ advice, key: asked.key });
    } catch (error) {
      set(ended.signal.aborted ? {} : { error });
    }
    running.current = null;
  };
  const { progress, advice, error } = state;
  return html`
    <div class="row row-between">
      <p class="note">Both run the recorded requests on virtual engines as fast as these. Nothing is changed.</p>
      <div class="row">
        <label class="row note">Traffic of the
          <${Select} options=${SPANS} value=${minutes} onChange=${(event) => span(event.target.value)} />
        </label>
        ${progress
          ? html`<${Button} onClick=${() => running.current?.abort()}>Stop</${Button}>`
          : html`<${Button} disabled=${disabled} onClick=${run}>Simulate</${Button}>`}
      </div>
    </div>
    ${progress && html`<${Progress} ...${progress} />`}
    ${error && html`<${Notice} tone="bad">${error.message}</${Notice}>`}
    ${advice && html`<${Result} advice=${advice} stale=${stale(state.key)} />`}
  `;
}

async function advise({ name, params, source }, minutes, signal, onProgress) {
  const { ttft_ms, tpot_ms } = slo.get();
  const body = {
    minutes,
    seeds: SEEDS,
    keep_roles: true,
    stream: true,
    candidates: [{ name, params, ...(source !== undefined && { source }) }],
    ...(ttft_ms > 0 && { slo_ttft_ms: ttft_ms }),
    ...(tpot_ms > 0 && { slo_tpot_ms: tpot_ms }),
  };
  const response = await call("POST", "admin/advise", { body, signal });
  for await (const { data } of eventsOf(response)) {
    const event = JSON.parse(data);
    if (event.advice) return event.advice;
    if (event.error) throw new ApiError(200, event.error);
    if (event.progress) onProgress(event.progress);
  }
  throw new ApiError(0, { message: "The router ended the simulation." });
}

function Progress({ done, total, candidate }) {
  return html`<div class="progress" role="status">
    <progress max=${total} value=${done} aria-label="Simulation"></progress>
    <span class="note">${candidate ? `Running ${candidate}: ${done + 1} of ${total}` : "Fitting the engines' speed"}</span>
  </div>`;
}

function Result({ advice, stale }) {
  const now = advice.ranking.find((row) => row.current);
  const tried = advice.ranking.find((row) => !row.current) ?? now;
  const same = tried === now;
  const goodput = advice.objective === "goodput";
  const figures = FIGURES.filter(([, key]) => goodput || key !== "attained");
  return html`<div class=${classes("simulated", stale && "stale")}>
    ${stale && html`<p class="note">The source or the parameters have changed since.</p>`}
    ${tried.failed
      ? html`<${Notice} tone="bad" title="It fails under this traffic.">${tried.failed}</${Notice}>`
      : html`<${Verdict} row=${tried} same=${same} goodput=${goodput} />`}
    <table class="table table-plain">
      <caption class="note">
        ${count(advice.traffic.requests)} requests of ${ms(1e3 * advice.traffic.seconds)}, ${advice.seeds} runs each
      </caption>
      <thead>
        <tr>
          <th scope="col">Simulated</th>
          <th scope="col" class="align-right">Active: ${now.title}</th>
          <th scope="col" class="align-right">${same ? "The same" : tried.title}</th>
          <th scope="col" class="align-right">Change</th>
        </tr>
      </thead>
      <tbody>
        ${figures.map(([title, key, shown, better]) => {
          const most = Math.max(now[key] ?? 0, tried[key] ?? 0, 1e-12);
          return html`<tr key=${key}>
            <th scope="row">${title}</th>
            <${Figure} value=${now[key]} most=${most} shown=${shown} tone="neutral" />
            <${Figure} value=${tried[key]} most=${most} shown=${shown} tone="accent" />
            <td class="align-right"><${Change} from=${now[key]} to=${tried[key]} better=${better} /></td>
          </tr>`;
        })}
      </tbody>
    </table>
    ${advice.notes.length > 0 && html`<ul class="note notes">${advice.notes.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}
  </div>`;
}

function Verdict({ row, same, goodput }) {
  if (same && !row.alike.length) return html`<${Notice}>This is what runs now.</${Notice}>`;
  if (same) return html`<${Notice}>Under this traffic it does the same as what runs now.</${Notice}>`;
  const what = goodput ? "of the requests within the objectives" : "of the mean time of a request";
  const said = `${row.gain >= 0 ? "Gains" : "Loses"} ${percent(Math.abs(row.gain))} ± ${percent(row.spread)} ${what}.`;
  const tone = row.worth_it ? "good" : row.gain < -row.spread ? "warn" : "neutral";
  return html`<${Notice} tone=${tone} title=${said}>${row.worth_it ? "" : row.gain > 0 ? "That is too little to be sure." : ""}</${Notice}>`;
}

function Figure({ value, most, shown, tone }) {
  return html`<td class="align-right figure">
    <span class="num">${shown(value)}</span>
    <span class="share" aria-hidden="true"><i class=${`seg-${tone}`} style=${{ width: `${(100 * (value ?? 0)) / most}%` }}></i></span>
  </td>`;
}

function Change({ from, to, better }) {
  if (from == null || to == null || !from) return "–";
  const share = to / from - 1;
  if (Math.abs(share) < LEAST_CHANGE) return html`<span class="note">same</span>`;
  const tone = better === 0 ? "neutral" : share * better > 0 ? "good" : "bad";
  return html`<${Badge} tone=${tone}>${share > 0 ? "+" : "−"}${percent(Math.abs(share))}</${Badge}>`;
}
