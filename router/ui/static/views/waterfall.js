// One request: its legs on the engines' time lines, its waits and retries, and all of it in words.
import { get } from "../api.js";
import { bytes, clock, count, ms, shortMs } from "../format.js";
import { html } from "../lib.js";
import { Badge, Card, Copyable, Empty, Meter, Notice, Stat, Table, usePolled } from "../parts.js";
import { calm, told } from "./story.js";

const RUNNING_MS = 500;
const DONE_MS = 60_000;
const TICKS = 5;
const NAMES = {
  prep_recv: "reserve room",
  remote_send: "prefill and put",
  start_generate: "generate",
  commit: "publish",
  pin: "pin",
  unpin: "unpin",
};

// The bars of a leg: {tone, from, to, title}, in ms since the request arrived.
function bars(leg, now) {
  const from = leg.start_ms;
  const to = from + (leg.ms ?? Math.max(0, now - from));
  const range = `[${leg.begin}, ${leg.end})`;
  if (leg.call === "remote_send") {
    const rest = leg.ms === null ? to : to - Math.min(leg.put_ms, leg.ms);
    const computed = leg.computed_tokens > 0 || leg.ms === null || leg.error;
    return [
      { tone: computed ? "compute" : "put", from, to: rest, title: `${range} to ${leg.to ?? "its receiver"}: ${computed ? "computed, and put layer by layer meanwhile" : "put"}` },
      { tone: "put", from: rest, to, title: `puts that were left after computing: ${ms(to - rest)}` },
    ].filter((bar) => bar.to > bar.from);
  }
  if (leg.call === "start_generate") {
    const first = leg.first_token_ms === null ? to : from + leg.first_token_ms;
    return [
      { tone: "prefill", from, to: first, title: `until its first token: ${ms(first - from)}` },
      { tone: "decode", from: first, to, title: `${count(leg.tokens)} tokens` },
    ].filter((bar) => bar.to > bar.from);
  }
  return [{ tone: "lease", from, to, title: range }];
}

// Lanes by engine in the order of their first legs; rows of legs that do not overlap share a line.
function lanesOf(receipt, now) {
  const lanes = new Map();
  const lane = (name) => {
    if (!lanes.has(name)) lanes.set(name, []);
    return lanes.get(name);
  };
  const put = (rows, item) => {
    const row = rows.find((one) => one.at(-1).to <= item.from);
    if (row) row.push(item);
    else rows.push([item]);
  };
  for (const wait of receipt.waiting) {
    const to = wait.start_ms + (wait.ms ?? Math.max(0, now - wait.start_ms));
    put(lane("router"), { key: `wait ${wait.start_ms}`, from: wait.start_ms, to, name: "waits", bars: [{ tone: "queue", from: wait.start_ms, to, title: wait.why }], title: `waited ${ms(to - wait.start_ms)} ${wait.why}` });
  }
  receipt.legs.forEach((leg, number) => {
    const parts = bars(leg, now);
    const to = leg.start_ms + (leg.ms ?? Math.max(0, now - leg.start_ms));
    const attempt = leg.attempt > 1 ? `, attempt ${leg.attempt}` : "";
    const choice = leg.choice > 0 ? `, choice ${leg.choice}` : "";
    put(lane(leg.engine), {
      key: number, from: leg.start_ms, to, name: leg.call, bars: parts, failed: Boolean(leg.error) && !calm(leg.error), open: leg.ms === null,
      title: `${leg.call} (${NAMES[leg.call]})${attempt}${choice}: ${ms(to - leg.start_ms)}${leg.error ? `; ${leg.error.type}: ${leg.error.message}` : ""}\n${parts.map((bar) => bar.title).join("\n")}`,
    });
  });
  return [...lanes.entries()];
}

function ticks(total) {
  const rough = total / TICKS;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= rough);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, number) => number * step);
}

function Waterfall({ receipt, now }) {
  const total = Math.max(now, 1);
  const at = (value) => `${(100 * Math.min(value, total)) / total}%`;
  const span = ({ from, to }) => ({ left: at(from), width: `max(2px, ${(100 * (Math.min(to, total) - from)) / total}%)` });
  const lanes = lanesOf(receipt, now);
  if (!lanes.length) return html`<${Empty} title="No leg yet">The strategy has called no engine.</${Empty}>`;
  const marks = [
    ...receipt.retries.map(({ at_ms, after_tokens, error }) => ({ at: at_ms, title: error.message, ...(calm(error)
      ? { tone: "move", text: `moved after ${after_tokens} tokens: engine drained` }
      : { tone: "bad", text: `retry after ${after_tokens} tokens` }) })),
    ...(receipt.first_token_ms === null ? [] : [{ at: receipt.first_token_ms, tone: "good", text: "first token", title: ms(receipt.first_token_ms) }]),
  ];
  const scale = ticks(total);
  return html`<div class="waterfall" role="img" aria-label="Legs of the request on the engines' time lines; the table below says the same.">
    <div class="lane lane-scale"><span></span><div class="lane-track">
      ${scale.map((tick) => html`<span class="tick" key=${tick} style=${{ left: at(tick) }}>${shortMs(tick)}</span>`)}
    </div></div>
    ${lanes.map(([name, rows]) => html`<div class="lane" key=${name}>
      <span class="lane-name" title=${name}>${name}</span>
      <div class="lane-track">
        ${scale.map((tick) => html`<i class="grid-line" key=${tick} style=${{ left: at(tick) }}></i>`)}
        ${rows.map((row, number) => html`<div class="lane-row" key=${number}>
          ${row.map((leg) => html`<div class=${`leg ${leg.failed ? "leg-failed" : ""} ${leg.open ? "leg-open" : ""}`} key=${leg.key} style=${span(leg)} title=${leg.title}>
            ${leg.bars.map((bar, part) => html`<i key=${part} class=${`bar bar-${bar.tone}`} style=${{ flexGrow: Math.max(bar.to - bar.from, 0.001) }}></i>`)}
            <span class="leg-name">${leg.name}</span>
          </div>`)}
        </div>`)}
        ${marks.map((mark, number) => html`<i class=${`mark mark-${mark.tone}`} key=${number} style=${{ left: at(mark.at) }} title=${`${mark.text}: ${mark.title}`}></i>`)}
      </div>
    </div>`)}
    <ul class="legend waterfall-legend">
      ${[["queue", "waits"], ["lease", "room reserved"], ["compute", "prefill, put meanwhile"], ["put", "put only"], ["prefill", "until the first token"], ["decode", "decode"]].map(
        ([tone, name]) => html`<li key=${tone}><i class=${`swatch bar-${tone}`}></i>${name}</li>`)}
      ${marks.map((mark, number) => html`<li key=${number}><i class=${`swatch mark-${mark.tone}`}></i>${mark.text} <b class="num">${ms(mark.at)}</b></li>`)}
    </ul>
  </div>`;
}

const LEGS = [
  { key: "engine", title: "Engine", render: ({ engine }) => html`<span class="mono">${engine}</span>` },
  { key: "call", title: "Call", render: ({ call, attempt, choice }) => html`<span class="mono">${call}</span>${attempt > 1 && html` <small>attempt ${attempt}</small>`}${choice > 0 && html` <small>choice ${choice}</small>`}` },
  { key: "range", title: "Range", align: "right", render: ({ begin, end }) => html`<span class="mono">[${begin}, ${end})</span>` },
  { key: "start", title: "Start", align: "right", render: ({ start_ms }) => ms(start_ms) },
  { key: "ms", title: "Duration", align: "right", render: ({ ms: took }) => (took === null ? "runs" : ms(took)) },
  { key: "cached", title: "Cached", align: "right", render: ({ call, match_len, cached_tokens }) => (call === "prep_recv" ? count(match_len) : cached_tokens ? count(cached_tokens) : "–") },
  { key: "computed", title: "Computed", align: "right", render: ({ computed_tokens }) => (computed_tokens ? count(computed_tokens) : "–") },
  { key: "put", title: "Put", align: "right", render: ({ bytes: size, to }) => (size ? html`${bytes(size)}${to && html` <small>→ ${to}</small>`}` : "–") },
  { key: "tokens", title: "Tokens", align: "right", render: ({ tokens }) => (tokens ? count(tokens) : "–") },
  { key: "end", title: "Outcome", render: ({ ms: took, error, collapsed }) => error ? html`<span class=${!calm(error) && "text-bad"} title=${error.message}>${error.type}</span>` : collapsed ? "nothing to send" : took === null ? "runs" : "ok" },
];

function Breakdown({ parts }) {
  const segments = [["queue", "queue"], ["prefill", "prefill"], ["migration", "put"], ["decode", "decode"]].map(
    ([label, tone]) => ({ label, tone, value: parts[label] ?? 0 }));
  const total = segments.reduce((sum, { value }) => sum + value, 0);
  return html`<${Meter} label="Where the time went" segments=${segments} total=${total} format=${ms} legend />`;
}

export function One({ id }) {
  const path = `admin/requests/${encodeURIComponent(id)}`;
  const { data, error } = usePolled(async (signal) => {
    const receipt = await get(path, { signal });
    return { receipt, read: Date.now() / 1e3 };
  }, [id], (last) => (last?.receipt.status === "running" || !last ? RUNNING_MS : DONE_MS));
  const back = html`<a class="back" href="#/requests">← All requests</a>`;
  if (!data) {
    return html`${back}${error
      ? html`<${Notice} tone=${error.status === 404 ? "neutral" : "bad"} title="No receipt.">${error.message}</${Notice}>`
      : html`<${Empty} title="Waiting for the router" />`}`;
  }
  const { receipt, read } = data;
  const now = receipt.ms ?? Math.max(1e3 * (read - receipt.created), ...receipt.legs.map(({ start_ms, ms: took }) => start_ms + (took ?? 0)));
  const { status, strategy, generation, prompt_tokens, cached_tokens, completion_tokens, first_token_ms, queued_ms, retries, fallbacks, delegates } = receipt;
  const emitted = receipt.ms === null ? receipt.legs.reduce((sum, { tokens }) => sum + tokens, 0) : completion_tokens;
  const tone = { done: "good", failed: "bad", running: "accent" }[status] ?? "neutral";
  const moves = retries.filter(({ error }) => calm(error)).length;
  return html`
    <div class="row row-between">${back}<span class="note">arrived ${clock(receipt.created)}</span></div>
    <div class="row request-head"><${Badge} tone=${tone} dot>${status}</${Badge}><${Copyable} text=${receipt.id} />
      <span class="note">${strategy}, generation ${generation}${receipt.key && `, key ${receipt.key}`}</span>
      ${delegates.map((name) => html`<${Badge} key=${name} title="a strategy that the strategy called">calls ${name}</${Badge}>`)}
      ${fallbacks.map((name) => html`<${Badge} key=${name} tone="warn" title="done otherwise than asked for">${name}</${Badge}>`)}</div>
    ${receipt.error && html`<${Notice} tone="bad" title=${receipt.error.type}>${receipt.error.message}</${Notice}>`}
    <div class="stats">
      <${Stat} label="Duration" value=${ms(now)} />
      <${Stat} label="First token" value=${ms(first_token_ms)} />
      <${Stat} label="Waited for room" value=${queued_ms || receipt.waiting.length ? ms(queued_ms) : "–"} tone=${queued_ms > 0 && "warn"} />
      <${Stat} label="Prompt" value=${count(prompt_tokens)} unit="tokens" note=${cached_tokens ? `${count(cached_tokens)} cached` : undefined} />
      <${Stat} label="Output" value=${count(emitted)} unit="tokens" />
      <${Stat} label="Retries" value=${count(retries.length - moves)} tone=${retries.length > moves && "warn"} note=${moves > 0 && `and moved ${moves === 1 ? "once" : `${moves} times`}`} />
    </div>
    <${Card} title="Time lines"><${Waterfall} receipt=${receipt} now=${now} /></${Card}>
    <div class="columns">
      <${Card} title="What happened">
        <ol class="story">${told(receipt).map(({ at, text, tone }, number) => html`<li key=${number} class=${tone && `story-${tone}`}><span class="num note">${ms(at)}</span><span>${text}</span></li>`)}</ol>
      </${Card}>
      <${Card} title="Where the time went">
        <${Breakdown} parts=${receipt.breakdown_ms} />
        <dl class="facts">
          ${Object.entries(receipt.params).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="mono">${JSON.stringify(value)}</dd></div>`)}
        </dl>
      </${Card}>
    </div>
    <${Card} title="Legs" note="Calls to engines, in the order of their beginning.">
      <${Table} label="Legs" columns=${LEGS} rows=${receipt.legs.map((leg, number) => ({ ...leg, number }))} rowKey=${({ number }) => number} empty="None." />
    </${Card}>`;
}
