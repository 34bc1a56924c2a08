// The frame: navigation, keyboard, theme, and the question for a key.
import { keys } from "./api.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./lib.js";
import { useLive } from "./live.js";
import { Button, Dialog, Field, Notice, Toasts } from "./parts.js";
import { isDark, themeChanges, toggleTheme } from "./theme.js";
import fleet from "./views/fleet.js";
import latency from "./views/latency.js";
import playground from "./views/playground.js";
import requests from "./views/requests.js";
import strategies from "./views/strategies.js";

const VIEWS = [fleet, requests, latency, strategies, playground];
const ICONS = {
  fleet: "M4 5h6v6H4zM14 5h6v6h-6zM4 15h6v4H4zM14 15h6v4h-6z",
  requests: "M4 6h9M8 12h12M4 18h6",
  latency: "M4 19V5M4 19h16M7 15l4-5 3 3 5-7",
  strategies: "M8 6l-5 6 5 6M16 6l5 6-5 6M13.5 4l-3 16",
  playground: "M4 5h16v11H9l-5 4z",
};
const SEQUENCE_MS = 1200; // between the two keys of a shortcut

const SHORTCUTS = [
  ...VIEWS.map(({ name, title }) => [`g ${name[0]}`, `Go to ${title}`]),
  ["t", "Light or dark"],
  ["?", "Show these keys"],
];

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...args] = path.split("/");
  const view = VIEWS.find((one) => one.name === name) ?? fleet;
  return { view, args: args.map(decoded), query: new URLSearchParams(query) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a % that a person typed
  }
}

function useRoute() {
  const [at, go] = useState(route);
  useEffect(() => {
    const moved = () => go(route());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return at;
}

function useShortcuts(show) {
  useEffect(() => {
    let prefix = 0; // when "g" was pressed
    const pressed = (event) => {
      const typing = event.target.closest?.("input, textarea, select, [contenteditable], dialog");
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const view = VIEWS.find(({ name }) => name[0] === event.key);
      if (view && Date.now() - prefix < SEQUENCE_MS) location.hash = `#/${view.name}`;
      else if (event.key === "?") show(true);
      else if (event.key === "t") toggleTheme();
      prefix = event.key === "g" ? Date.now() : 0;
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function Icon({ path }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${path} /></svg>`;
}

function Navigation({ current }) {
  return html`<nav class="nav" aria-label="Views">
    <a class="brand" href="#/fleet" aria-label="microserve"><img src="ui/icon.svg" alt="" width="24" height="24" /><span>microserve</span></a>
    <ul>
      ${VIEWS.map(
        ({ name, title }) =>
          html`<li key=${name}>
            <a href=${`#/${name}`} aria-current=${name === current ? "page" : undefined} title=${`g ${name[0]}`}>
              <${Icon} path=${ICONS[name]} /><span>${title}</span>
            </a>
          </li>`,
      )}
    </ul>
  </nav>`;
}

const STATES = { open: ["good", "Live"], connecting: ["warn", "Connecting"], waiting: ["bad", "Disconnected"] };

function Header({ title, onKeys }) {
  const { status, now } = useLive();
  const [dark, set] = useState(isDark);
  const [tone, said] = STATES[status];
  useEffect(() => themeChanges(() => set(isDark())), []);
  return html`<header class="top">
    <h1>${title}</h1>
    <div class="actions">
      ${now && html`<span class="now" title="The active strategy">
        <b>${now.active.strategy}</b> <span class="note">generation ${now.active.generation}</span>
      </span>`}
      <span class=${`state tone-${tone}`} role="status"><i class="dot" aria-hidden="true"></i>${said}</span>
      ${keys.has("admin") && html`<button type="button" class="icon-button" title="Forget the key" aria-label="Forget the key" onClick=${forget}><${Icon} path="M9 5H5v14h4M13 8l4 4-4 4M17 12H9" /></button>`}
      <button type="button" class="icon-button" title="Keyboard (?)" aria-label="Keyboard shortcuts" onClick=${onKeys}>?</button>
      <button type="button" class="icon-button" title="Light or dark (t)" aria-label=${dark ? "Light colors" : "Dark colors"} onClick=${toggleTheme}><${Icon} path=${dark ? "M12 8a4 4 0 100 8 4 4 0 000-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19" : "M20 14.5A8 8 0 019.5 4 8 8 0 1020 14.5z"} /></button>
    </div>
  </header>`;
}

function forget() {
  keys.forget();
  location.reload();
}

function KeyQuestion() {
  const [question, set] = useState(null);
  const [typed, type] = useState("");
  useEffect(() => keys.watch(set), []);
  if (!question) return null;
  const admin = question.kind === "admin";
  const answer = (event) => {
    event.preventDefault();
    if (!typed) return;
    keys.answer(question.kind, typed);
    type("");
  };
  return html`<${Dialog} title=${admin ? "Admin key" : "API key"} onClose=${() => keys.answer(question.kind, null)}>
    <form onSubmit=${answer}>
      <p>
        ${admin ? "The admin API of this router needs its key." : "This router's API needs a key."}
        ${" "}This tab keeps it until it is closed, and stores it nowhere else.
      </p>
      <${Field} label="Key" type="password" autocomplete="off" autofocus spellcheck=${false} value=${typed}
        error=${question.refused && "The router refused this key."} onInput=${(event) => type(event.target.value)} />
      <footer class="dialog-actions"><${Button} tone="primary" type="submit">Continue</${Button}></footer>
    </form>
  </${Dialog}>`;
}

function Shortcuts({ onClose }) {
  return html`<${Dialog} title="Keyboard" onClose=${onClose}>
    <dl class="shortcuts">
      ${SHORTCUTS.map(
        ([pressed, does]) =>
          html`<div key=${pressed}><dt>${pressed.split(" ").map((one) => html`<kbd>${one}</kbd>`)}</dt><dd>${does}</dd></div>`,
      )}
    </dl>
  </${Dialog}>`;
}

// A view that fails does not take the frame with it.
function Guarded({ view: { View }, args, query }) {
  const [error, retry] = useErrorBoundary((error) => console.error(error));
  if (error) {
    return html`<${Notice} tone="bad" title="This view failed." action=${html`<${Button} small onClick=${retry}>Try again</${Button}>`}>
      ${String(error.message)}
    </${Notice}>`;
  }
  return html`<${View} args=${args} query=${query} />`;
}

function Connection() {
  const { status, error, now } = useLive();
  if (status !== "waiting" || !error) return null;
  const stale = now && " What is shown is the last that it told.";
  return html`<${Notice} tone=${error.status ? "bad" : "warn"}>${error.message}${stale}</${Notice}>`;
}

function App() {
  const { view, args, query } = useRoute();
  const [keyboard, show] = useState(false);
  useShortcuts(show);
  useEffect(() => {
    document.title = `${view.title} · microserve`;
  }, [view]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the content</a>
    <${Navigation} current=${view.name} />
    <div class="page">
      <${Header} title=${view.title} onKeys=${() => show(true)} />
      <main id="main" tabindex="-1">
        <${Connection} />
        <${Guarded} key=${view.name} view=${view} args=${args} query=${query} />
      </main>
    </div>
    <${Toasts} />
    <${KeyQuestion} />
    ${keyboard && html`<${Shortcuts} onClose=${() => show(false)} />`}
  `;
}

render(html`<${App} />`, document.getElementById("app"));
