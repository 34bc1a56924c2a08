// The requests that run and those that ran lately; one of them as a waterfall (waterfall.js).
import { get } from "../api.js";
import { ago, count, ms } from "../format.js";
import { html } from "../lib.js";
import { Badge, Card, Notice, Table, Tabs, usePolled } from "../parts.js";
import { One } from "./waterfall.js";

const MOST = 100;
const EVERY_MS = 1000;
const LISTS = {
  slowest: ["Slowest", "order=slowest&state=ended&seconds=300", "The slowest that ended in the last five minutes."],
  live: ["Running", "order=newest&state=live", "Those that run now, the newest first."],
  newest: ["Latest", "order=newest&state=ended", "Those that ended, the latest arrivals first."],
};
const PHASES = { queue: "queue", prefill: "prefill", migration: "put", decode: "decode" };

export function Status({ of: { status, phase, error } }) {
  if (phase) {
    const [kind, where] = phase.split(/ (.*)/s);
    return html`<${Badge} tone=${PHASES[kind] ?? "neutral"} dot title=${where}>${kind}</${Badge}>`;
  }
  const tone = { done: "good", failed: "bad", cancelled: "neutral", running: "accent" }[status];
  return html`<${Badge} tone=${tone}>${(status === "failed" && (error?.type ?? error)) || status}</${Badge}>`;
}

function columns(longest) {
  return [
    { key: "id", title: "Request", render: ({ id }) => html`<code class="mono id">${id}</code>` },
    { key: "status", title: "Phase", render: (one) => html`<span class="row nowrap"><${Status} of=${one} />${one.retries > 0 && html`<${Badge} tone="warn" title="attempts after the first: an engine failed or was drained">${one.retries} ${one.retries === 1 ? "retry" : "retries"}</${Badge}>`}</span>` },
    {
      key: "ms", title: "Duration", class: "wide-cell",
      render: ({ ms: took, queued_ms, first_token_ms }) => {
        const part = (value) => ({ width: `${(100 * Math.max(0, value)) / longest}%` });
        const waited = Math.min(queued_ms, first_token_ms ?? took);
        return html`<span class="took"><span class="num"><b>${ms(took)}</b>${queued_ms > 0 && html` <small>waited ${ms(queued_ms)}</small>`}</span><span class="took-bar" aria-hidden="true">
          <i class="seg-queue" style=${part(waited)}></i><i class="seg-prefill" style=${part((first_token_ms ?? took) - waited)}></i><i class="seg-decode" style=${part(took - (first_token_ms ?? took))}></i>
        </span></span>`;
      },
    },
    { key: "ttft", title: "TTFT", align: "right", render: ({ first_token_ms }) => ms(first_token_ms) },
    { key: "tpot", title: "TPOT", align: "right", render: ({ per_token_ms }) => ms(per_token_ms) },
    {
      key: "prompt", title: "Prompt", align: "right",
      render: ({ prompt_tokens, cached_tokens }) => html`<span title=${`${cached_tokens} cached`}>${count(prompt_tokens)}${cached_tokens > 0 && html` <small>${Math.round((100 * cached_tokens) / prompt_tokens)} % cached</small>`}</span>`,
    },
    { key: "tokens", title: "Output", align: "right", render: ({ completion_tokens }) => count(completion_tokens) },
    { key: "engines", title: "Engines", render: ({ engines }) => html`<span class="mono">${engines.length === 0 && "–"}${engines.map((name, at) => html`${at > 0 && " "}<span key=${name} class="num">${name}${at < engines.length - 1 && ","}</span>`)}</span>` },
    { key: "strategy", title: "Strategy", render: ({ strategy, generation }) => html`${strategy} <small class="num">gen ${generation}</small>` },
    { key: "created", title: "Arrived", align: "right", render: ({ created }) => html`<span class="num note">${ago(created)}</span>` },
  ];
}

function List({ show }) {
  const [, query, about] = LISTS[show];
  const { data, error } = usePolled((signal) => get(`admin/requests?limit=${MOST}&${query}`, { signal }), [query], EVERY_MS);
  const rows = data?.requests ?? [];
  const longest = Math.max(1, ...rows.map(({ ms: took }) => took));
  return html`
    ${error && html`<${Notice} tone="warn">${error.message}</${Notice}>`}
    <${Card}
      title="Requests" note=${about}
      actions=${html`<${Tabs} label="Which requests" value=${show} tabs=${Object.entries(LISTS).map(([name, [title]]) => [name, title])}
        onChange=${(name) => (location.hash = `#/requests?show=${name}`)} />`}
    >
      <${Table} label="Requests" columns=${columns(longest)} rows=${rows} rowKey=${({ id, created }) => `${id} ${created}`}
        href=${({ id }) => `#/requests/${encodeURIComponent(id)}`} empty=${data ? "None." : "Waiting for the router."} />
    </${Card}>`;
}

function View({ args, query }) {
  if (args.length && args[0]) return html`<${One} key=${args.join("/")} id=${args.join("/")} />`;
  const show = query.get("show");
  return html`<${List} show=${show in LISTS ? show : "slowest"} />`;
}

export default { name: "requests", title: "Requests", View };
