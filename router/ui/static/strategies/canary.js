// The canary: how it does so far, what it may do, and what became of it.
import { send } from "../api.js";
import { html, useState } from "../lib.js";
import { count, ms } from "../format.js";
import { Button, Card, Dialog, Field, Meter, Notice, toast, useAction } from "../parts.js";

export function CanaryCard({ state, live, onChange }) {
  const running = live?.canary ?? state.canary;
  if (running) return html`<${Running} canary=${running} state=${state} live=${live} onChange=${onChange} />`;
  return state.last_canary && html`<${Ended} last=${state.last_canary} />`;
}

function Running({ canary, state, live, onChange }) {
  const { generation, min_requests: wanted, ended, failed, slow } = canary;
  const own = state.generations.find((one) => one.generation === generation);
  const name = own?.name ?? canary.strategy ?? "";
  const mayFail = Math.floor(canary.max_error_rate * wanted + 1e-9);
  const maySlow = wanted - Math.ceil(0.99 * wanted - 1e-9);
  const promote = useAction(async () => {
    await send("POST", "admin/promote", { generation });
    toast(`Generation ${generation} serves all requests.`);
    onChange();
  });
  const rollback = useAction(async () => {
    await send("POST", "admin/rollback", {});
    toast(`The canary, generation ${generation}, has ended.`);
    onChange();
  });
  const error = promote.error ?? rollback.error;
  const limit = canary.max_ttft_p99_ms;
  return html`<${Card}
    class="canary"
    title=${html`Canary: ${name}`}
    note=${`Generation ${generation} gets ${count(canary.percent)} % of the requests until ${count(wanted)} have ended.`}
    actions=${html`
      <${Button} tone="primary" busy=${promote.busy} onClick=${promote.run}>Promote now</${Button}>
      <${Button} tone="danger" busy=${rollback.busy} onClick=${rollback.run}>Roll back</${Button}>
    `}
  >
    <div class="canary-body">
      <${Budget} title="Ended" used=${ended} of=${wanted} tone="accent" />
      <${Budget} title="Failed" used=${failed} of=${mayFail} tone="bad" budget />
      ${limit != null &&
      html`<${Budget} title=${`First token over ${ms(limit)}`} used=${slow} of=${maySlow} tone="queue" budget />`}
      <${Compared} live=${live} canary=${generation} active=${state.active.generation} />
    </div>
    <p role="status" class="note">${verdictSoFar(canary, mayFail, maySlow)}</p>
    ${error && html`<${Notice} tone="bad">${error.message}</${Notice}>`}
  </${Card}>`;
}

function verdictSoFar({ ended, failed, slow, min_requests: wanted, max_ttft_p99_ms: limit }, mayFail, maySlow) {
  if (!ended) return "No request of the canary has ended yet.";
  const left = Math.max(0, wanted - ended);
  const spare = `${count(Math.max(0, mayFail - failed))} more may fail`;
  const late = limit == null ? "" : ` and ${count(Math.max(0, maySlow - slow))} more may be late`;
  return `It is promoted after ${count(left)} more requests. Until then ${spare}${late}; one more than that, and it is rolled back.`;
}

function Budget({ title, used, of, tone, budget }) {
  return html`<div class="budget">
    <div class="row row-between"><span class="stat-label">${title}</span><span class="num">${count(used)} ${budget ? "of at most" : "of"} ${count(of)}</span></div>
    <${Meter} label=${title} total=${Math.max(of, used, 1)} segments=${[{ label: title, value: used, tone }]} format=${count} />
  </div>`;
}

// The requests of both generations that ended in the window of the snapshot, side by side.
function Compared({ live, canary, active }) {
  const [now, tried] = [active, canary].map((number) => live?.latency?.find((one) => one.generation === number));
  if (!now || !tried) return null;
  return html`<table class="table table-plain">
    <thead><tr><th scope="col"></th><th scope="col" class="align-right">Active</th><th scope="col" class="align-right">Canary</th></tr></thead>
    <tbody>
      ${[
        ["TTFT p50", (one) => ms(one.ttft_ms.p50)],
        ["TTFT p99", (one) => ms(one.ttft_ms.p99)],
        ["TPOT p50", (one) => ms(one.tpot_ms.p50)],
        ["Requests", (one) => count(one.requests)],
      ].map(
        ([title, shown]) => html`<tr key=${title}>
          <th scope="row">${title}</th><td class="align-right num">${shown(now)}</td><td class="align-right num">${shown(tried)}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

function Ended({ last }) {
  const promoted = last.decision === "promoted";
  return html`<${Notice} tone=${promoted ? "good" : "bad"} title=${promoted ? "Canary promoted." : "Canary rolled back."}>
    Generation ${last.generation}: ${last.why}
  </${Notice}>`;
}

const RULES = [
  { name: "percent", label: "Share of requests (%)", value: "10", hint: "more than 0, up to 100" },
  { name: "min_requests", label: "Requests until the verdict", value: "50", hint: "1 or more" },
  { name: "max_error_rate", label: "Share that may fail", value: "0.02", hint: "0 to 1" },
  { name: "max_ttft_p99_ms", label: "TTFT p99 limit (ms)", value: "", hint: "empty: no limit" },
];

// Asks for the rules. `onStart(rules)` resolves to true once the canary runs.
export function CanaryDialog({ name, onStart, onClose }) {
  const [values, set] = useState(Object.fromEntries(RULES.map((one) => [one.name, one.value])));
  const start = useAction(async () => {
    const rules = {};
    for (const { name, label } of RULES) {
      if (values[name].trim() === "") continue;
      rules[name] = Number(values[name]);
      if (Number.isNaN(rules[name])) throw Object.assign(new Error(`${label}: this is no number.`), { param: `canary.${name}` });
    }
    if (await onStart(rules)) onClose();
  });
  const submit = (event) => {
    event.preventDefault();
    start.run();
  };
  return html`<${Dialog} title=${`Start a canary of ${name}`} onClose=${onClose}>
    <form onSubmit=${submit}>
      <p class="note">
        The canary gets its share of the new requests. It is promoted, or rolled back, as soon as its requests decide.
        Requests that run are not touched.
      </p>
      <div class="fields">
        ${RULES.map(
          ({ name, label, hint }) => html`<${Field} key=${name} label=${label} hint=${hint} inputmode="decimal" value=${values[name]}
            error=${start.error?.param === `canary.${name}` && start.error.message}
            onInput=${(event) => set({ ...values, [name]: event.target.value })} />`,
        )}
      </div>
      ${start.error && !start.error.param?.startsWith("canary.") && html`<${Notice} tone="bad">${start.error.message}</${Notice}>`}
      <footer class="dialog-actions">
        <${Button} onClick=${onClose}>Cancel</${Button}>
        <${Button} tone="primary" type="submit" busy=${start.busy}>Start canary</${Button}>
      </footer>
    </form>
  </${Dialog}>`;
}
