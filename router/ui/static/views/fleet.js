// The engines: what they do, what their pools hold, and the KV that moves between them.
import { send } from "../api.js";
import { bytes, count, ms } from "../format.js";
import { html, useState } from "../lib.js";
import { useLive } from "../live.js";
import {
  Badge, Button, Card, Dialog, Empty, Field, Meter, Notice, Select, Sparkline, Stat, Table, classes, toast, useAction,
} from "../parts.js";
import { Flows } from "./flows.js";

const SHOWN = 120; // snapshots in a sparkline
const CARDS = 20; // engines that have cards; more are rows of a table
const ROLES = ["any", "prefill", "decode"];
const OWNERS = [
  ["active", "decode"],
  ["leased", "put"],
  ["cached", "prefill"],
  ["lent", "line-3"],
  ["quarantined", "queue"],
];

const engine = (id) => `admin/engines/${encodeURIComponent(id)}`;

function Health({ of: { status, draining, breaker } }) {
  const tone = { up: "good", suspect: "warn", down: "bad" }[status] ?? "neutral";
  return html`<span class="row">
    <${Badge} tone=${tone} dot>${status}</${Badge}>
    ${draining && html`<${Badge} tone="warn">draining</${Badge}>`}
    ${breaker !== "closed" && html`<${Badge} tone="bad">breaker ${breaker}</${Badge}>`}
  </span>`;
}

const RoleBadge = ({ role }) => html`<${Badge} tone=${role === "any" ? "neutral" : role}>${role}</${Badge}>`;

function Totals({ now, ring }) {
  const recent = ring.slice(-SHOWN);
  const spark = (pick, label, tone) => html`<${Sparkline} values=${recent.map(pick)} label=${`${label}, the last two minutes`} tone=${tone} />`;
  const { requests, engines } = now;
  const up = engines.filter(({ usable }) => usable).length;
  const moved = (snapshot) => snapshot.flows.reduce((sum, flow) => sum + flow.bytes, 0);
  return html`<div class="stats">
    <${Stat} label="Engines in use" value=${`${up} / ${engines.length}`} tone=${up < engines.length && "warn"}
      note=${now.workers > 1 ? `${now.workers} router workers` : now.engines[0]?.model} />
    <${Stat} label="Requests running" value=${count(requests.live)}>${spark((one) => one.requests.live, "Requests running")}</${Stat}>
    <${Stat} label="Waiting for room" value=${count(requests.queued)} tone=${requests.queued > 0 && "warn"}>${spark((one) => one.requests.queued, "Waiting for room")}</${Stat}>
    <${Stat} label="Requests ended" value=${count(requests.ended_per_s)} unit="/s">${spark((one) => one.requests.ended_per_s, "Requests ended")}</${Stat}>
    <${Stat} label="Tokens" value=${count(requests.tokens_per_s)} unit="/s">${spark((one) => one.requests.tokens_per_s, "Tokens")}</${Stat}>
    <${Stat} label="KV moved" value=${bytes(moved(now))} unit="/s">${spark(moved, "KV moved")}</${Stat}>
    <${Stat} label="Failures" value=${count(requests.failed_per_s)} unit="/s" tone=${requests.failed_per_s > 0 && "bad"}>${spark((one) => one.requests.failed_per_s, "Failures")}</${Stat}>
  </div>`;
}

const pagesOf = ({ pages }) => OWNERS.map(([label, tone]) => ({ label, tone, value: pages[label] }));

const share = ({ total, free }) => (total - free) / Math.max(total, 1);
const used = (pages) => `${Math.round(100 * share(pages))} %`;

const Epoch = ({ of: { epoch } }) => html`<span class="note num" title=${`epoch ${epoch}: changes when its process is another one`}>epoch …${(epoch ?? "–").slice(-6)}</span>`;

function Pool({ pages, pageSize }) {
  const segments = pagesOf({ pages });
  return html`<div class="pool">
    <div class="row row-between">
      <span class="note">KV pool, ${count(pages.total)} pages of ${pageSize} tokens</span>
      <b class="num">${used(pages)}</b>
    </div>
    <${Meter} label="Pages by owner" segments=${segments} total=${pages.total} format=${count} />
    <ul class="legend">
      ${segments.map(({ label, tone, value }) => (value > 0 || ["active", "leased", "cached"].includes(label)) &&
        html`<li key=${label}><i class=${`swatch seg-${tone}`}></i>${label} <b class="num">${count(value)}</b></li>`)}
      <li><i class="swatch seg-free"></i>free <b class="num">${count(pages.free)}</b></li>
      ${pages.pinned > 0 && html`<li title="part of cached and active">pinned <b class="num">${count(pages.pinned)}</b></li>`}
      ${pages.borrowed > 0 && html`<li title="in the pools of other engines">borrowed <b class="num">${count(pages.borrowed)}</b></li>`}
    </ul>
  </div>`;
}

// What changes an engine. `lead` is at the left of it; `compact`: in one line.
function Controls({ one, onMove, lead, compact }) {
  const change = useAction(async (changes, said) => {
    const { moved } = await send("PATCH", engine(one.id), changes);
    toast(moved ? `${said}; ${moved} running requests move away` : said);
  });
  return html`<div class=${classes("row", compact ? "nowrap" : "row-between")}>
      ${lead}
      <div class=${classes("row", compact && "nowrap")}>
        <label class="inline">${!compact && "Role"}
          <${Select} class="input input-small" aria-label=${`Role of ${one.id}`} value=${one.role} options=${ROLES} disabled=${change.busy}
            onChange=${(event) => change.run({ role: event.target.value }, `${one.id} is for ${event.target.value}`)} />
        </label>
        <${Button} small onClick=${() => onMove(one.id)} disabled=${one.status !== "up"} aria-label=${`Move a prefix from ${one.id}`}>${compact ? "Move…" : "Move a prefix"}</${Button}>
        <${Button} small busy=${change.busy} tone=${one.draining ? "plain" : "danger"} aria-label=${one.draining ? `Use ${one.id} again` : `Drain ${one.id}`}
          onClick=${() => change.run({ draining: !one.draining }, one.draining ? `${one.id} takes work again` : `${one.id} drains`)}>
          ${one.draining ? "Use again" : "Drain"}
        </${Button}>
      </div>
    </div>
    ${change.error && html`<${Notice} tone="bad">${change.error.message}</${Notice}>`}`;
}

function EngineCard({ one, ring, onMove }) {
  const past = ring.slice(-SHOWN).map((snapshot) => {
    const then = snapshot.engines.find(({ url }) => url === one.url);
    return then ? then.requests : null;
  });
  const numbers = [
    ["running", one.running, "sequences in its batch"],
    ["waiting", one.waiting, "in its queue"],
    ["requests", one.requests, "of this router with open calls to it"],
    ["load", one.load.tokens, "tokens to prefill or send that this router has given it"],
    ["leases", one.leases, "room reserved for KV of other engines"],
    ["puts", one.puts_in_flight, "in flight"],
  ];
  return html`<${Card} class="engine" title=${one.id} note=${one.url}
      actions=${html`<${RoleBadge} role=${one.role} /><${Health} of=${one} />`}>
    ${one.problem && html`<${Notice} tone=${one.status === "up" ? "warn" : "bad"}>${one.problem}</${Notice}>`}
    ${one.pages && html`<${Pool} pages=${one.pages} pageSize=${one.page_size} />`}
    <dl class="numbers">
      ${numbers.map(([name, value, title]) => html`<div key=${name} title=${title}><dt>${name}</dt><dd>${count(value)}</dd></div>`)}
    </dl>
    <${Sparkline} values=${past} tone=${one.role === "any" ? "accent" : one.role} label=${`Requests with calls to ${one.id}, the last two minutes`} />
    ${one.tiers.map((tier) => html`<p class="note" key=${tier.name}>${tier.name}: ${count(tier.total - tier.free)} of ${count(tier.total)} pages</p>`)}
    <${Controls} one=${one} onMove=${onMove} lead=${html`<${Epoch} of=${one} />`} />
  </${Card}>`;
}

const number = (key, title, pick) => ({ key, title, align: "right", by: (one) => pick(one) ?? -1, render: (one) => count(pick(one)) });

const columns = (onMove) => [
  {
    key: "engine", title: "Engine", by: ({ id }) => id,
    render: (one) => html`<b class="num" title=${`${one.url}, epoch ${one.epoch}`}>${one.id}</b>${one.problem && html`<div class=${one.status === "up" ? "text-warn" : "text-bad"}>${one.problem}</div>`}`,
  },
  { key: "role", title: "Role", by: ({ role }) => role, render: ({ role }) => html`<${RoleBadge} role=${role} />` },
  { key: "health", title: "Health", by: ({ status, draining, breaker }) => `${status} ${draining} ${breaker}`, render: (one) => html`<${Health} of=${one} />` },
  {
    key: "pool", title: "KV pool", class: "wide-cell", by: ({ pages }) => (pages ? share(pages) : -1),
    render: (one) => one.pages && html`<span class="took"><b class="num">${used(one.pages)}</b><${Meter} label="Pages by owner" segments=${pagesOf(one)} total=${one.pages.total} format=${count} /></span>`,
  },
  number("running", "Running", (one) => one.running),
  number("waiting", "Waiting", (one) => one.waiting),
  number("requests", "Requests", (one) => one.requests),
  number("load", "Load", (one) => one.load.tokens),
  { key: "change", title: "Change", render: (one) => html`<${Controls} one=${one} onMove=${onMove} compact />` },
];

function Move({ from, engines, onClose }) {
  const others = engines.filter(({ id, usable }) => usable && id !== from).map(({ id }) => id);
  const [to, choose] = useState(others[0] ?? "");
  const [prefix, write] = useState("");
  const [pin, mark] = useState(false);
  const move = useAction(async () => {
    const { tokens, sent_tokens, bytes: size, ms: took } = await send("POST", "admin/migrate", { prefix, from, to, pin });
    toast(`${count(tokens)} tokens are at ${to}: ${count(sent_tokens)} sent, ${bytes(size)} in ${ms(took)}`);
    onClose();
  });
  return html`<${Dialog} title=${`Move a prefix from ${from}`} onClose=${onClose}>
    <form onSubmit=${(event) => { event.preventDefault(); move.run(); }}>
      <p class="note">Puts the KV that ${from} has cached of a text into another engine's prefix cache.</p>
      <${Field} label="Text of the prefix">
        ${(about) => html`<textarea class="input" rows="5" required ...${about} value=${prefix} onInput=${(event) => write(event.target.value)}></textarea>`}
      </${Field}>
      <${Field} label="To">
        ${(about) => html`<${Select} ...${about} value=${to} options=${others} onChange=${(event) => choose(event.target.value)} />`}
      </${Field}>
      <label class="check"><input type="checkbox" checked=${pin} onChange=${(event) => mark(event.target.checked)} /> Keep it there from eviction</label>
      ${move.error && html`<${Notice} tone="bad">${move.error.message}</${Notice}>`}
      <footer class="dialog-actions">
        <${Button} onClick=${onClose}>Cancel</${Button}>
        <${Button} tone="primary" type="submit" busy=${move.busy} disabled=${!prefix || !to}>Move</${Button}>
      </footer>
    </form>
  </${Dialog}>`;
}

function View() {
  const { now, ring } = useLive();
  const [moving, move] = useState(null);
  if (!now) return html`<${Empty} title="Waiting for the router" />`;
  const { engines } = now;
  const many = engines.length > CARDS;
  const flows = engines.length > 1 && html`<${Card} title="KV between engines" note="puts of the last second; replicas are dashed">
    <${Flows} now=${now} ring=${ring} />
  </${Card}>`;
  return html`
    <${Totals} now=${now} ring=${ring} />
    ${many ? html`<${Card} title="Engines">
      <${Table} label="Engines" columns=${columns(move)} rows=${engines} rowKey=${({ url }) => url} />
    </${Card}>` : flows}
    ${engines.length === 0 && html`<${Empty} title="No engines">Start one with <code>microserve engine --router</code>.</${Empty}>`}
    ${many ? flows : html`<div class="grid grid-engines">
      ${engines.map((one) => html`<${EngineCard} key=${one.url} one=${one} ring=${ring} onMove=${move} />`)}
    </div>`}
    ${moving && html`<${Move} from=${moving} engines=${engines} onClose=${() => move(null)} />`}
  `;
}

export default { name: "fleet", title: "Fleet", View };
