// One strategy: its source, and the way from an edit to what runs.
import { send } from "../api.js";
import { html, useEffect, useState } from "../lib.js";
import { count } from "../format.js";
import { Editor } from "../editor.js";
import { ParamsForm, readParams } from "../params.js";
import { Badge, Button, Card, Dialog, Notice, toast, useAction } from "../parts.js";
import { renamed, strategyName } from "../python.js";
import { CanaryDialog } from "./canary.js";
import { dropDraft, freeName, putDraft } from "./drafts.js";
import { Simulation } from "./simulation.js";

const KINDS = {
  syntax: "Syntax error",
  load: "It cannot be loaded",
  params: "A parameter is wrong",
  rule: "It breaks a rule in the dry run",
  unsupported: "The engines lack a call",
  ended: "It ended its process",
  late: "It took too long",
};

export const go = (name) => (location.hash = `#/strategies/${encodeURIComponent(name)}`);

// `shown`: {name, source, installed, …} of the router, or null for a draft alone. `draft`: the
// edited text, or undefined. `taken`: names that a new strategy cannot have.
export function Workbench({ selected, shown, draft, state, taken, onChange }) {
  const text = draft ?? shown?.source ?? "";
  const edited = draft !== undefined && draft !== shown?.source;
  const name = edited ? strategyName(text) : selected;
  const fixed = !edited && shown?.installed;
  const listed = state.strategies.find((one) => one.name === name);
  const [checked, setChecked] = useState(null); // {text, result}
  const [values, setValues] = useState(() => valuesOf(state.active, selected, listed));
  const [wrongParam, setWrongParam] = useState(null);
  const [asking, ask] = useState(null); // "canary" or "activate"
  const [jumps, jump] = useState(0);

  useEffect(() => {
    if (draft !== undefined && draft === shown?.source) dropDraft(selected); // it is loaded
  }, [draft, shown]);

  const result = checked?.text === text ? checked.result : null;
  const problem = result?.problems[0];
  const schemas = (edited ? result?.ok && result.params : null) ?? listed?.params ?? shown?.params ?? {};
  const taking = () => readParams(schemas, values);
  const isActive = !edited && state.active.name === name && state.active.source_sha256 === shown?.source_sha256;

  const refused = (error) => {
    const param = /^params\.(\w+)/.exec(error.param ?? "");
    setWrongParam(param ? { name: param[1], message: error.message } : null);
    return error;
  };
  const check = useAction(async () => {
    setWrongParam(null);
    let params;
    try {
      // Without a result yet the schemas may be those of another version: the router reads them.
      params = taking();
    } catch (error) {
      throw refused(error);
    }
    const told = await send("POST", "admin/strategies/check", { source: text, name: strategyName(text), params });
    setChecked({ text, result: told });
    jump((number) => number + 1);
    const [wrong] = told.problems;
    if (wrong?.kind === "params") refused(wrong);
    return told.ok;
  });

  // Loads what was edited. Resolves to the name that can be activated, or null.
  const loaded = async () => {
    if (!edited) return name;
    if (!result?.ok && !(await check.run())) return null;
    const told = await send("POST", "admin/strategies", { source: text, name });
    onChange();
    return told.name;
  };
  const start = async (canary) => {
    try {
      const params = taking();
      const ready = await loaded();
      if (!ready) throw new Error("The check has found a problem.");
      const body = { name: ready, params, if_generation: state.active.generation };
      const told = await send("PUT", "admin/strategy", canary ? { ...body, canary } : body);
      toast(canary ? `Generation ${told.generation} is a canary.` : `Generation ${told.generation} is active.`);
      onChange();
      if (ready !== selected) {
        dropDraft(selected);
        go(ready);
      }
      return true;
    } catch (error) {
      throw refused(error);
    }
  };
  const copy = () => {
    const other = freeName(`my_${name}`.replace(/^my_my_/, "my_"), taken);
    putDraft(other, renamed(text, name, other));
    go(other);
  };
  const type = (next) => (next === shown?.source ? dropDraft(selected) : putDraft(selected, next));
  const discard = () => {
    dropDraft(selected);
    if (!shown) go(state.active.name);
  };

  const candidate = () => {
    const params = taking();
    return { name, params, source: edited ? text : undefined, key: JSON.stringify([text, params]) };
  };
  const stale = (key) => {
    try {
      return key !== candidate().key;
    } catch {
      return true;
    }
  };
  const noUploads = edited && !state.uploads;
  const unnamed = edited && !name;
  const blocked = noUploads || unnamed;

  return html`
    <${Card}
      class="workbench"
      title=${html`${name || selected} ${isActive && html`<${Badge} tone="good">active</${Badge}>`}
        ${edited && html` <${Badge} tone="warn">${shown ? "edited" : "draft"}</${Badge}>`}`}
      note=${firstLine(result?.ok ? result.doc : (listed?.doc ?? shown?.doc))}
      actions=${html`
        ${fixed && html`<${Button} onClick=${copy}>Edit a copy</${Button}>`}
        ${draft !== undefined && html`<${Button} onClick=${discard}>Discard</${Button}>`}
        <${Button} disabled=${blocked || fixed || !state.uploads} busy=${check.busy} onClick=${check.run} title="Ctrl+Enter">Check</${Button}>
        <${Button} disabled=${blocked || Boolean(state.canary)} onClick=${() => ask("canary")}>Canary…</${Button}>
        <${Button} tone="primary" disabled=${blocked || (isActive && sameParams(state.active, schemas, values))} onClick=${() => ask("activate")}>Activate…</${Button}>
      `}
    >
      ${noUploads && html`<${Notice} tone="warn">This router loads no sources: it was started without <code>--allow-upload</code>.</${Notice}>`}
      ${unnamed && html`<${Notice} tone="warn">There is no function below <code>@strategy</code> in this source.</${Notice}>`}
      <${Editor}
        value=${text}
        label=${`Source of ${name || selected}`}
        describedBy=${problem && "check-result"}
        readOnly=${fixed}
        mark=${problem && { ...problem, message: brief(problem.message), show: jumps }}
        onInput=${type}
        onRun=${() => !blocked && !fixed && state.uploads && check.run()}
      />
      <div id="check-result">
        ${check.error && html`<${Notice} tone="bad">${check.error.message}</${Notice}>`}
        ${problem && html`<${Problem} problem=${problem} onShow=${() => jump((number) => number + 1)} />`}
        ${result?.ok && html`<${Passed} result=${result} />`}
        ${fixed && html`<p class="note">An installed strategy: edit a copy of it.</p>`}
      </div>
    </${Card}>
    <div class="strategies-main">
      <${Card} title="Parameters" note="What is empty keeps its default.">
        <${ParamsForm} schemas=${schemas} values=${values} problem=${wrongParam} onChange=${(next) => {
          setValues(next);
          setWrongParam(null);
        }} />
      </${Card}>
      <${Card} title="Simulate on recorded traffic">
        <${Simulation} candidate=${candidate} stale=${stale} disabled=${blocked} />
      </${Card}>
    </div>
    ${asking === "canary" && html`<${CanaryDialog} name=${name} onStart=${start} onClose=${() => ask(null)} />`}
    ${asking === "activate" &&
    html`<${Confirm} name=${name} active=${state.active} loads=${edited} onStart=${() => start(null)} onClose=${() => ask(null)} />`}
  `;
}

function Confirm({ name, active, loads, onStart, onClose }) {
  const action = useAction(async () => (await onStart()) && onClose());
  return html`<${Dialog}
    title=${`Activate ${name}`}
    onClose=${onClose}
    actions=${html`
      <${Button} onClick=${onClose}>Cancel</${Button}>
      <${Button} tone="primary" busy=${action.busy} onClick=${action.run}>Activate</${Button}>
    `}
  >
    <p>
      ${loads && "The source is checked and loaded. "}All new requests go by <b>${name}</b> instead of <b>${active.name}</b>, generation
      ${" "}${active.generation}. Streams that run go on as they began.
    </p>
    ${action.error && html`<${Notice} tone="bad">${action.error.message}</${Notice}>`}
  </${Dialog}>`;
}

function Problem({ problem, onShow }) {
  const { kind, line, column, message } = problem;
  const place = line && html`<${Button} small onClick=${onShow}>Line ${line}${column ? `, column ${column}` : ""}</${Button}>`;
  return html`<${Notice} tone="bad" title=${`${KINDS[kind] ?? "A problem"}.`} action=${place}>${withoutPlace(message)}</${Notice}>`;
}

function Passed({ result }) {
  const fallbacks = result.fallbacks.length ? ` On these engines it falls back: ${result.fallbacks.join(", ")}.` : "";
  return html`<${Notice} tone="good" title="The check has passed.">
    It answered ${count(result.requests)} requests in virtual time, cancelled and with dying engines, too.${fallbacks}
  </${Notice}>`;
}

const firstLine = (doc) => (doc ?? "").split("\n")[0];
const withoutPlace = (message) => message.replace(/^[^\n]{0,300}?:\d+: /, "");
const brief = (message) => {
  const said = withoutPlace(message).split("\n")[0];
  return said.length > 90 ? `${said.slice(0, 89)}…` : said;
};

// What is typed for the parameters that differ from the defaults.
function valuesOf(active, name, listed) {
  if (active.name !== name || !listed) return {};
  const texts = {};
  for (const [param, value] of Object.entries(active.params)) {
    const schema = listed.params[param];
    if (!schema || JSON.stringify(value) === JSON.stringify(schema.default)) continue;
    texts[param] = typeof value === "string" && !schema.enum ? value : JSON.stringify(value);
  }
  return texts;
}

function sameParams(active, schemas, values) {
  try {
    const read = readParams(schemas, values);
    return Object.keys(schemas).every((name) => JSON.stringify(read[name] ?? schemas[name].default) === JSON.stringify(active.params[name]));
  } catch {
    return false;
  }
}
