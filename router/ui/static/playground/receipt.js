// What the router did for a request, in short. The view of requests has the whole of it.
import { html, useEffect, useState } from "../lib.js";
import { bytes, count, ms } from "../format.js";
import { Badge, Meter, Notice, Table } from "../parts.js";
import { receiptOf } from "./chat.js";

const TONES = { done: "good", running: "accent", failed: "bad", cancelled: "warn" };
const PHASES = { queue: "queue", prefill: "prefill", migration: "put", decode: "decode" };

const LEGS = [
  { key: "call", title: "Call", render: (leg) => html`<code>${leg.call}</code>` },
  { key: "engine", title: "Engine", render: ({ engine, replica }) => (replica ? `${engine} → ${replica}` : engine) },
  { key: "start", title: "From", align: "right", class: "num", render: ({ start_ms }) => ms(start_ms) },
  { key: "ms", title: "Took", align: "right", class: "num", render: (leg) => ms(leg.ms) },
  { key: "did", title: "Did", class: "wrap", render: did },
];

function did(leg) {
  if (leg.error) return html`<span class="text-bad">${leg.error.type}: ${leg.error.message}</span>`;
  const said = [];
  if (leg.tokens) said.push(`${count(leg.tokens)} tokens`);
  if (leg.match_len != null) said.push(`${count(leg.match_len)} of ${count(leg.end)} cached`);
  if (leg.sent_tokens) said.push(`sent ${count(leg.sent_tokens)} (${bytes(leg.bytes)})`);
  if (leg.computed_tokens) said.push(`computed ${count(leg.computed_tokens)}`);
  if (leg.recomputed_tokens) said.push(`computed ${count(leg.recomputed_tokens)} again`);
  return said.join(", ");
}

// `id`: of a request that has ended.
export function ReceiptOf({ id }) {
  const [{ receipt, error }, set] = useState({});
  useEffect(() => {
    const left = new AbortController();
    set({});
    receiptOf(id, left.signal).then(
      (receipt) => left.signal.aborted || set({ receipt }),
      (error) => left.signal.aborted || set({ error }),
    );
    return () => left.abort();
  }, [id]);
  if (error) {
    const hidden = error.status === 401 || error.status === 403;
    return html`<${Notice} tone=${hidden ? "neutral" : "bad"}>${hidden ? "Receipts need the admin key." : error.message}</${Notice}>`;
  }
  if (!receipt) return html`<p class="note">Waiting for the receipt…</p>`;
  const phases = Object.entries(receipt.breakdown_ms ?? {})
    .filter(([, value]) => value > 0)
    .map(([label, value]) => ({ label, value, tone: PHASES[label] ?? "neutral" }));
  const total = phases.reduce((sum, { value }) => sum + value, 0);
  const notes = [
    receipt.waits > 0 && `waited ${ms(receipt.queued_ms)} for room`,
    receipt.retries.length > 0 && `${receipt.retries.length} retries`,
    ...receipt.fallbacks.map((one) => `fell back: ${one.replaceAll("_", " ")}`),
  ].filter(Boolean);
  return html`
    <dl class="facts">
      <div><dt>Status</dt><dd><${Badge} tone=${TONES[receipt.status] ?? "neutral"}>${receipt.status}</${Badge}></dd></div>
      <div><dt>Strategy</dt><dd>${receipt.strategy} <small>generation ${receipt.generation}</small></dd></div>
      <div><dt>Prompt</dt><dd>${count(receipt.prompt_tokens)} tokens, ${count(receipt.cached_tokens)} cached</dd></div>
      <div><dt>Answer</dt><dd>${count(receipt.completion_tokens)} tokens in ${ms(receipt.ms)}</dd></div>
      <div><dt>Request</dt><dd><a class="mono" href=${`#/requests/${encodeURIComponent(id)}`}>${id}</a></dd></div>
    </dl>
    ${receipt.error && html`<${Notice} tone="bad" title=${receipt.error.type}>${receipt.error.message}</${Notice}>`}
    ${phases.length > 0 && html`<${Meter} label="Where the time went" segments=${phases} total=${total} format=${ms} legend />`}
    ${notes.length > 0 && html`<p class="note">${notes.join(" · ")}</p>`}
    <${Table} label="Legs" class="legs" columns=${LEGS} rows=${receipt.legs.map((leg, at) => ({ ...leg, at }))} rowKey=${(leg) => leg.at} empty="No engine was called." />
  `;
}
