import { get } from "../api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { count, ms } from "../format.js";
import { Badge, Button, Card, Empty, Notice } from "../parts.js";
import { ask } from "../playground/chat.js";
import { ReceiptOf } from "../playground/receipt.js";
import { DEFAULTS, Settings, requestFields } from "../playground/settings.js";
import { TokenTiming } from "../playground/timing.js";

// What stays while the page is open: [{role, content, run}], and the settings.
const kept = { turns: [], settings: DEFAULTS };

function View() {
  const [turns, setTurns] = useState(() => kept.turns.map(stopped));
  const [settings, setSettings] = useState(kept.settings);
  const [models, setModels] = useState([]);
  const [typed, type] = useState("");
  const [problem, setProblem] = useState(null);
  const [chosen, choose] = useState(null); // the turn whose times are shown; null: the last one
  const running = useRef(null);
  const alive = useRef(true);
  kept.turns = turns;
  kept.settings = settings;

  useEffect(() => {
    alive.current = true;
    const left = new AbortController();
    get("v1/models", { signal: left.signal }).then(
      ({ data }) => {
        const names = data.map(({ id }) => id);
        setModels(names);
        setSettings((now) => (names.includes(now.model) ? now : { ...now, model: names[0] ?? "" }));
      },
      (error) => left.signal.aborted || setProblem(error),
    );
    return () => {
      alive.current = false;
      left.abort();
      running.current?.abort();
    };
  }, []);

  const answer = async (asked) => {
    let fields;
    try {
      fields = requestFields(settings);
    } catch (error) {
      setProblem(error);
      return false;
    }
    setProblem(null);
    choose(null);
    const messages = [
      ...(settings.system ? [{ role: "system", content: settings.system }] : []),
      ...asked.filter((one) => one.content).map(({ role, content }) => ({ role, content })),
    ];
    const body = { messages, ...fields, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    const ended = (running.current = new AbortController());
    const show = (run) => alive.current && setTurns([...asked, { role: "assistant", content: run.text, run }]);
    show({ id: "", text: "", tokens: [], ended: null });
    const run = await ask(body, ended.signal, paced(show));
    running.current = null;
    show(run);
    if (run.error?.param) setProblem(run.error);
    return true;
  };
  const submit = (event) => {
    event?.preventDefault();
    const content = typed.trim();
    if (!content || running.current) return;
    answer([...turns, { role: "user", content }]).then((asked) => !asked && type(content));
    type("");
  };
  const again = () => answer(turns.slice(0, turns.findLastIndex((one) => one.role === "user") + 1));

  const last = turns.at(-1);
  const busy = last?.run && last.run.ended === null;
  const shown = turns[chosen ?? turns.length - 1]?.run;
  return html`<div class="playground">
    <${Card} class="chat" title="Chat" actions=${html`
      ${turns.length > 0 && !busy && html`<${Button} small onClick=${again}>Ask again</${Button}>`}
      ${turns.length > 0 && html`<${Button} small disabled=${busy} onClick=${() => setTurns([])}>Clear</${Button}>`}
    `}>
      <${Turns} turns=${turns} shown=${shown} onChoose=${choose} />
      ${problem && !problem.param && html`<${Notice} tone="bad">${problem.message}</${Notice}>`}
      <form class="prompt" onSubmit=${submit}>
        <textarea
          class="input"
          rows="3"
          aria-label="Message"
          placeholder="Ask something. Enter sends, Shift+Enter begins a line."
          value=${typed}
          onInput=${(event) => type(event.target.value)}
          onKeyDown=${(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
          }}
        ></textarea>
        ${busy
          ? html`<${Button} onClick=${() => running.current?.abort()}>Stop</${Button}>`
          : html`<${Button} tone="primary" type="submit" disabled=${!typed.trim()}>Send</${Button}>`}
      </form>
    </${Card}>
    <div class="playground-side">
      <${Card} title="Settings"><${Settings} settings=${settings} models=${models} problem=${problem} onChange=${setSettings} /></${Card}>
      <${Card} title="Timing" note="As this browser sees it.">
        ${shown ? html`<${TokenTiming} run=${shown} />` : html`<p class="note">Ask something to see when each token comes.</p>`}
      </${Card}>
      <${Card} title="Receipt" note="What the router did.">
        ${shown?.id && shown.ended !== null ? html`<${ReceiptOf} id=${shown.id} />` : html`<p class="note">It is there when the answer has ended.</p>`}
      </${Card}>
    </div>
  </div>`;
}

// An answer that ended when the view was left.
function stopped(turn) {
  return turn.run?.ended === null ? { ...turn, run: { ...turn.run, ended: turn.run.tokens.at(-1)?.at ?? 0, finish: "stopped" } } : turn;
}

// At most one call a frame, with the latest value; tokens may come faster than a page can be drawn.
function paced(show) {
  let next = null;
  return (run) => {
    if (next === null) requestAnimationFrame(() => {
      const latest = next;
      next = null;
      if (latest.ended === null) show(latest);
    });
    next = run;
  };
}

function Turns({ turns, shown, onChoose }) {
  const box = useRef();
  const length = turns.at(-1)?.content.length;
  useLayoutEffect(() => {
    const { scrollHeight, clientHeight, scrollTop } = box.current;
    if (scrollHeight - clientHeight - scrollTop < 160) box.current.scrollTop = scrollHeight;
  }, [turns.length, length]);
  return html`<div class="turns" ref=${box} role="log" aria-label="Conversation" tabindex="0">
    ${turns.length === 0 && html`<${Empty} title="Nothing asked yet.">The answer goes by the active strategy, like any client's.</${Empty}>`}
    ${turns.map(({ role, content, run }, at) => html`<article key=${at} class=${`turn turn-${role}`}>
      <header class="row">
        <b>${role === "user" ? "You" : "Model"}</b>
        ${run && html`<${Outcome} run=${run} />`}
        ${run?.ended != null && shown !== run && html`<${Button} small onClick=${() => onChoose(at)}>Times and receipt</${Button}>`}
      </header>
      <p class="turn-text">${content}${run && run.ended === null && html`<i class="caret" aria-hidden="true"></i>`}</p>
      ${run?.error && html`<${Notice} tone="bad" title=${run.error.type}>${run.error.message}</${Notice}>`}
    </article>`)}
  </div>`;
}

function Outcome({ run }) {
  if (run.ended === null) return html`<span class="note">${run.tokens.length ? "" : "waiting for the first token"}</span>`;
  const tokens = run.usage?.completion_tokens ?? run.tokens.reduce((sum, one) => sum + one.count, 0);
  return html`
    <span class="note num">${count(tokens)} tokens in ${ms(run.ended)}</span>
    ${run.finish && run.finish !== "stop" && html`<${Badge} tone="warn">${run.finish}</${Badge}>`}
  `;
}

export default { name: "playground", title: "Playground", View };
