// A form from the JSON schemas of a strategy's parameters.
import { html } from "./lib.js";
import { Field, Select } from "./parts.js";

const BOUNDS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", multipleOf: "a multiple of",
  minLength: "length ≥", maxLength: "length ≤", pattern: "matches", minItems: "items ≥", maxItems: "items ≤",
};

// `values`: {name: the text that was typed}; a name that is missing has its default.
// `problem`: {name, message} of the parameter that the router refused.
export function ParamsForm({ schemas, values, onChange, problem }) {
  const names = Object.keys(schemas);
  if (!names.length) return html`<p class="note">This strategy has no parameters.</p>`;
  const set = (name, text) => {
    const { [name]: _, ...others } = values;
    onChange(text === "" ? others : { ...others, [name]: text });
  };
  return html`<div class="fields fields-params">
    ${names.map((name) => {
      const schema = schemas[name];
      const text = values[name] ?? "";
      const wrong = text === "" ? null : readParam(schema, text).error;
      const refused = problem?.name === name ? problem.message : null;
      return html`<${Field} key=${name} label=${name} hint=${hintOf(schema)} error=${wrong ?? refused}>
        ${(attributes) => input(schema, text, (next) => set(name, next), attributes)}
      </${Field}>`;
    })}
  </div>`;
}

function input(schema, text, set, attributes) {
  const changed = (event) => set(event.target.value);
  const usual = `default: ${JSON.stringify(schema.default)}`;
  const choices = schema.type === "boolean" ? [true, false] : schema.enum;
  if (choices?.every((one) => typeof one !== "object")) {
    const options = [["", usual], ...choices.map((one) => [JSON.stringify(one), String(one)])];
    return html`<${Select} ...${attributes} options=${options} value=${text} onChange=${changed} />`;
  }
  const list = `${attributes.id}-list`;
  const known = variants(schema).flatMap((one) => one.enum ?? ("const" in one ? [one.const] : []));
  return html`
    <input class="input" ...${attributes} value=${text} placeholder=${usual} onInput=${changed} autocomplete="off"
      spellcheck=${false} list=${known.length ? list : undefined} />
    ${known.length > 0 && html`<datalist id=${list}>${known.map((one) => html`<option key=${one} value=${String(one)} />`)}</datalist>`}
  `;
}

const variants = (schema) => schema.anyOf ?? schema.oneOf ?? [schema];

function hintOf(schema) {
  const bounds = variants(schema).flatMap((one) =>
    Object.entries(BOUNDS).flatMap(([key, sign]) => (key in one ? [`${sign} ${one[key]}`] : [])),
  );
  return [schema.description, [...new Set(bounds)].join(", ")].filter(Boolean).join(" · ") || kindOf(schema);
}

function kindOf(schema) {
  return variants(schema)
    .map((one) => one.type ?? ("const" in one ? JSON.stringify(one.const) : one.enum ? one.enum.join(" | ") : "JSON"))
    .join(" or ");
}

// The JSON value of a text, as {value} or {error}. The router has the last word.
export function readParam(schema, text) {
  const kinds = variants(schema);
  const takesText = kinds.some((one) => one.type === "string" || typeof one.const === "string" || one.enum?.some((value) => typeof value === "string"));
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return takesText ? { value: text } : { error: `This is no ${kindOf(schema)}.` };
  }
  if (typeof value === "string" || !takesText) return { value };
  const others = kinds.some((one) => one.type !== "string" && !("const" in one));
  return { value: others || "enum" in schema ? value : text };
}

// The parameters as JSON values. Throws an error with `param` for one that is none.
export function readParams(schemas, values) {
  const read = {};
  for (const [name, text] of Object.entries(values)) {
    if (!(name in schemas)) continue; // of another version of the strategy
    const { value, error } = readParam(schemas[name], text);
    if (error) throw Object.assign(new Error(`${name}: ${error}`), { param: `params.${name}` });
    read[name] = value;
  }
  return read;
}
