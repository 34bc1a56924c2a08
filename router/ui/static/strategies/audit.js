// Who has changed what, when.
import { get } from "../api.js";
import { html, useState } from "../lib.js";
import { Badge, Button, Card, Notice, Table, usePolled } from "../parts.js";

const SHOWN = 12;
const WORDS = {
  started: ["neutral", "started"],
  load: ["neutral", "loaded"],
  activate: ["accent", "activated"],
  canary: ["warn", "canary began"],
  promote: ["good", "promoted"],
  rollback: ["warn", "rolled back"],
  canary_rolled_back: ["bad", "canary rolled back"],
  fallback: ["bad", "fell back"],
};

const when = (at) => {
  const date = new Date(at);
  const today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString("en-GB") : date.toLocaleString("en-GB");
};

const COLUMNS = [
  { key: "at", title: "When", class: "num", render: ({ at }) => html`<time datetime=${at} title=${at}>${when(at)}</time>` },
  {
    key: "what",
    title: "What",
    render: ({ what }) => {
      const [tone, word] = WORDS[what] ?? ["neutral", String(what).replaceAll("_", " ")];
      return html`<${Badge} tone=${tone}>${word}</${Badge}>`;
    },
  },
  { key: "name", title: "Strategy", render: ({ name, generation }) => html`${name ?? ""}${generation != null && html` <small>generation ${generation}</small>`}` },
  { key: "who", title: "Who" },
  { key: "why", title: "Why, with what", class: "wrap", render: (entry) => html`${entry.why}${entry.why && " "}<small class="mono">${shownParams(entry)}</small>` },
];

const shownParams = ({ params }) =>
  params && Object.keys(params).length ? Object.entries(params).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(" ") : "";

// `turn` changes when there may be new entries.
export function AuditLog({ turn }) {
  const [all, show] = useState(false);
  const { data, error } = usePolled((signal) => get("admin/audit", { signal }), [turn], 10_000);
  const entries = data ? [...data.entries].reverse() : [];
  const shown = all ? entries : entries.slice(0, SHOWN);
  const more = entries.length > SHOWN && html`<${Button} small onClick=${() => show(!all)}>${all ? "Fewer" : `All ${entries.length}`}</${Button}>`;
  return html`<${Card} title="Audit log" note="Every change of what runs, the newest first." actions=${more}>
    ${error && html`<${Notice} tone="bad">${error.message}</${Notice}>`}
    <${Table} label="Audit log" class="audit" columns=${COLUMNS} rows=${shown.map((entry, at) => ({ ...entry, key: entries.length - at }))}
      rowKey=${(entry) => entry.key} empty=${data ? "Nothing has happened yet." : "Loading…"} />
  </${Card}>`;
}
