import { get, send } from "../api.js";
import { html, useState } from "../lib.js";
import { count } from "../format.js";
import { useLive } from "../live.js";
import { Badge, Button, Card, Empty, Notice, toast, useAction, usePolled } from "../parts.js";
import { AuditLog } from "../strategies/audit.js";
import { CanaryCard } from "../strategies/canary.js";
import { TEMPLATE, freeName, putDraft, useDrafts } from "../strategies/drafts.js";
import { Workbench, go } from "../strategies/workbench.js";

const LOOK_MS = 2000;

function View({ args }) {
  const { now } = useLive();
  const drafts = useDrafts();
  const running = now && `${now.active.generation} ${now.canary?.generation}`;
  const { data: state, error, reload } = usePolled((signal) => get("admin/strategies", { signal }), [running], LOOK_MS);
  if (!state) return error ? html`<${Notice} tone="bad">${error.message}</${Notice}>` : html`<${Empty} title="Loading…" />`;
  const selected = args[0] || state.active.name;
  const turn = JSON.stringify([state.active.generation, state.canary?.generation, state.last_canary, state.strategies.map((one) => one.source_sha256)]);
  return html`
    ${error && html`<${Notice} tone="warn">${error.message}</${Notice}>`}
    <${Running} state=${state} onChange=${reload} />
    <${CanaryCard} state=${state} live=${now} onChange=${reload} />
    <div class="strategies">
      <${List} state=${state} drafts=${drafts} selected=${selected} />
      <div class="strategies-main">
        <${Chosen} key=${selected} selected=${selected} state=${state} draft=${drafts.get(selected)} drafts=${drafts} onChange=${reload} />
      </div>
    </div>
    <${AuditLog} turn=${turn} />
  `;
}

function Running({ state, onChange }) {
  const { active, generations } = state;
  const rollback = useAction(async () => {
    const told = await send("POST", "admin/rollback", {});
    toast(`Rolled back: generation ${told.generation} runs ${told.name}.`);
    onChange();
  });
  const older = generations.filter((one) => one.generation !== active.generation && one.generation !== state.canary?.generation);
  const offences = Object.entries(active.offences);
  const params = Object.entries(active.params);
  return html`<${Card}>
    <div class="row row-between">
      <div class="row running">
        <span class="stat-label">Active</span>
        <a class="running-name" href=${`#/strategies/${encodeURIComponent(active.name)}`}>${active.name}</a>
        <${Badge} tone="accent">generation ${active.generation}</${Badge}>
        <span class="note">${count(active.in_flight)} in flight</span>
        ${params.length > 0 && html`<code class="note">${params.map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(" ")}</code>`}
        ${offences.map(([kind, number]) => html`<${Badge} key=${kind} tone="bad" title="Rules that it has broken">${kind.replaceAll("_", " ")} × ${number}</${Badge}>`)}
      </div>
      ${!state.canary && html`<${Button} tone="danger" busy=${rollback.busy} onClick=${rollback.run} disabled=${!state.can_roll_back}
        title=${state.can_roll_back ? "Activate what was active before" : "There is no earlier generation to go back to"}>Roll back</${Button}>`}
    </div>
    ${older.length > 0 &&
    html`<div class="row note">
      Earlier generations still answer:
      ${older.map((one) => html`<${Badge} key=${one.generation}>${one.name}, generation ${one.generation}: ${count(one.in_flight)} in flight</${Badge}>`)}
    </div>`}
    ${rollback.error && html`<${Notice} tone="bad">${rollback.error.message}</${Notice}>`}
  </${Card}>`;
}

function List({ state, drafts, selected }) {
  const known = new Map(state.strategies.map((one) => [one.name, one]));
  const trial = state.canary && state.generations.find((one) => one.generation === state.canary.generation)?.name;
  const names = [...new Set([...known.keys(), ...drafts.keys(), selected])].sort();
  const create = () => {
    const name = freeName("my_strategy", new Set(names));
    putDraft(name, TEMPLATE.replace("NAME", name));
    go(name);
  };
  return html`<nav class="card strategy-list" aria-label="Strategies">
    <ul>
      ${names.map((name) => {
        const one = known.get(name);
        return html`<li key=${name}>
          <a href=${`#/strategies/${encodeURIComponent(name)}`} aria-current=${name === selected ? "true" : undefined}>
            <span class="strategy-name">${name}</span>
            <span class="row">
              ${name === state.active.name && html`<${Badge} tone="good">active</${Badge}>`}
              ${name === trial && html`<${Badge} tone="warn">canary</${Badge}>`}
              ${one && !one.installed && html`<${Badge} tone="accent">loaded</${Badge}>`}
              ${drafts.has(name) && html`<${Badge} tone="warn">${one ? "edited" : "draft"}</${Badge}>`}
            </span>
          </a>
        </li>`;
      })}
    </ul>
    <${Button} small onClick=${create}>New strategy</${Button}>
  </nav>`;
}

function Chosen({ selected, state, draft, drafts, onChange }) {
  const listed = state.strategies.find((one) => one.name === selected);
  const { active } = state;
  const other = active.name === selected && listed?.source_sha256 !== active.source_sha256 && draft === undefined;
  const [older, showOlder] = useState(false);
  const wanted = other && older ? `?generation=${active.generation}` : "";
  const path = `admin/strategies/${encodeURIComponent(selected)}${wanted}`;
  const version = wanted || listed?.source_sha256;
  const { data, error } = usePolled((signal) => (listed ? get(path, { signal }) : null), [version ?? ""]);
  if (error) return html`<${Notice} tone="bad">${error.message}</${Notice}>`;
  if (!listed && draft === undefined) {
    return html`<${Card}><${Empty} title=${`There is no strategy “${selected}”.`}>It may have been a draft of another tab.</${Empty}></${Card}>`;
  }
  if (listed && !data && draft === undefined) return html`<${Card}><${Empty} title="Loading…" /></${Card}>`;
  const taken = new Set([...state.strategies.map((one) => one.name), ...drafts.keys()]);
  return html`
    ${other &&
    html`<${Notice} tone="warn" action=${html`<${Button} small onClick=${() => showOlder(!older)}>${older ? "Show the loaded one" : "Show what runs"}</${Button}>`}>
      ${older ? `This is what generation ${active.generation} runs.` : `Generation ${active.generation} runs an earlier version than this one.`}
    </${Notice}>`}
    <${Workbench} selected=${selected} shown=${data} draft=${draft} state=${state} taken=${taken} onChange=${onChange} />
  `;
}

export default { name: "strategies", title: "Strategies", View };
