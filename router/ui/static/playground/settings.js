// What is asked besides the messages: model, system prompt, sampling, key.
import { keys } from "../api.js";
import { html, useEffect, useState } from "../lib.js";
import { Button, Field, Select } from "../parts.js";

const WHOLE = { inputmode: "numeric" };
// Name in the API, label, what is allowed, and further attributes. Empty means the API's default.
const SAMPLING = [
  ["max_tokens", "Max tokens", "1 or more", WHOLE],
  ["temperature", "Temperature", "0 to 2"],
  ["top_p", "Top p", "more than 0, up to 1"],
  ["top_k", "Top k", "0: all", WHOLE],
  ["min_p", "Min p", "0 to 1"],
  ["seed", "Seed", "whole number", WHOLE],
  ["presence_penalty", "Presence penalty", "−2 to 2"],
  ["frequency_penalty", "Frequency penalty", "−2 to 2"],
];

const USUAL = 2; // of these are always shown

export const DEFAULTS = { model: "", system: "", stop: "", max_tokens: "200", temperature: "0.7" };

// The fields of a request, from what was typed. Throws an error with `param`.
export function requestFields(settings) {
  const fields = {};
  if (settings.model) fields.model = settings.model;
  for (const [name, label] of SAMPLING) {
    const text = (settings[name] ?? "").trim();
    if (text === "") continue;
    fields[name] = Number(text);
    if (Number.isNaN(fields[name])) throw Object.assign(new Error(`${label}: this is no number.`), { param: name });
  }
  if (settings.stop) fields.stop = settings.stop.split("\n").filter(Boolean);
  return fields;
}

export function Settings({ settings, models, problem, onChange }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.value });
  const wrong = (name) => problem?.param === name && problem.message;
  const number = ([name, label, hint, more]) => html`<${Field} key=${name} label=${label} placeholder=${hint} inputmode="decimal" ...${more}
    autocomplete="off" value=${settings[name] ?? ""} error=${wrong(name)} onInput=${set(name)} />`;
  return html`<div class="settings">
    ${models.length > 1 &&
    html`<${Field} label="Model">${(attributes) => html`<${Select} ...${attributes} options=${models} value=${settings.model} onChange=${set("model")} />`}</${Field}>`}
    <${Field} label="System prompt">${(attributes) => html`<textarea class="input" rows="2" ...${attributes} value=${settings.system} onInput=${set("system")}></textarea>`}</${Field}>
    <div class="fields fields-small">${SAMPLING.slice(0, USUAL).map(number)}</div>
    <details class="more">
      <summary>More sampling, API key</summary>
      <div class="settings">
        <div class="fields fields-small">${SAMPLING.slice(USUAL).map(number)}</div>
        <${Field} label="Stop" hint="One text a line." error=${wrong("stop")}>${(attributes) => html`<textarea class="input mono" rows="1" ...${attributes} value=${settings.stop} onInput=${set("stop")}></textarea>`}</${Field}>
        <${ApiKey} />
      </div>
    </details>
  </div>`;
}

// The key of clients, where the router has any. The page asks for it when a call is refused, too.
function ApiKey() {
  const [typed, type] = useState("");
  const [kept, keep] = useState(keys.has("api"));
  useEffect(() => keys.watch(() => keep(keys.has("api"))), []);
  const save = (event) => {
    event.preventDefault();
    if (!typed) return;
    keys.answer("api", typed);
    type("");
  };
  return html`<form class="api-key" onSubmit=${save}>
    <${Field} label="API key" type="password" autocomplete="off" value=${typed} placeholder=${kept ? "kept for this tab" : "if the router needs one"}
      onInput=${(event) => type(event.target.value)} />
    <${Button} type="submit" disabled=${!typed}>${kept ? "Change" : "Use"}</${Button}>
  </form>`;
}
