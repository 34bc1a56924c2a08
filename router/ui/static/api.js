// Calls to the router that served this page. Keys live in sessionStorage and travel in headers.

const BASE = new URL("../", import.meta.url); // right behind a path prefix, too
const LEAST_PAUSE_MS = 300;
const MOST_PAUSE_MS = 5000;

export class ApiError extends Error {
  // `status` is 0 if the router could not be reached.
  constructor(status, { type = "unreachable", code = null, message = "", param = null } = {}) {
    super(message || `HTTP ${status}`);
    Object.assign(this, { status, type, code, param });
  }
}

// ---- keys

const asking = { admin: null, api: null }; // a question that is open: {promise, resolve, refused}
const watchers = new Set();

const slot = (kind) => `microserve.${kind}-key`;
const keyOf = (kind) => sessionStorage.getItem(slot(kind)) || "";

// The kind of key that a path takes: clients' API key, or the admin key.
const kindOf = (path) => (path.startsWith("v1/") || path.endsWith("tokenize") ? "api" : "admin");

export const keys = {
  // Calls `watcher(question)` when a key is wanted, `{kind, refused}`, and with null afterwards.
  watch(watcher) {
    watchers.add(watcher);
    watcher(keys.question());
    return () => watchers.delete(watcher);
  },
  question() {
    const kind = asking.admin ? "admin" : asking.api ? "api" : null;
    return kind && { kind, refused: asking[kind].refused };
  },
  // Answers the open question; null: the user gives none.
  answer(kind, key) {
    const question = asking[kind];
    asking[kind] = null;
    if (key) sessionStorage.setItem(slot(kind), key);
    question?.resolve(Boolean(key));
    announce();
  },
  has: (kind) => Boolean(keyOf(kind)),
  forget() {
    for (const kind of Object.keys(asking)) sessionStorage.removeItem(slot(kind));
    announce();
  },
};

function announce() {
  for (const watcher of watchers) watcher(keys.question());
}

// Resolves to true once the user has given another key than `used`.
function askFor(kind, used) {
  if (keyOf(kind) && keyOf(kind) !== used) return Promise.resolve(true); // given meanwhile
  if (!asking[kind]) {
    const question = { refused: Boolean(used) };
    question.promise = new Promise((resolve) => (question.resolve = resolve));
    asking[kind] = question;
    announce();
  }
  return asking[kind].promise;
}

// ---- calls

// Fetches `path`, relative to the router's root. Asks for a key where one is needed.
// Throws ApiError. `signal` aborts it, with an AbortError.
export async function call(method, path, { body, signal, headers = {}, ask = true } = {}) {
  path = path.replace(/^\//, "");
  const kind = kindOf(path);
  for (;;) {
    const key = keyOf(kind);
    const init = {
      method,
      signal,
      headers: { ...headers },
      credentials: "omit",
      referrerPolicy: "no-referrer",
      cache: "no-store",
    };
    if (key) init.headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) {
      init.headers["Content-Type"] = "application/json";
      init.body = JSON.stringify(body);
    }
    let response;
    try {
      response = await fetch(new URL(path, BASE), init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The router cannot be reached." });
    }
    if (response.ok) return response;
    const error = await problemOf(response);
    if (response.status !== 401 || !ask || !(await askFor(kind, key))) throw error;
  }
}

async function problemOf(response) {
  let problem = {};
  try {
    problem = (await response.json()).error ?? {};
  } catch {
    // not an error of the router: a proxy's
  }
  const message = problem.message || `HTTP ${response.status} ${response.statusText}`.trim();
  return new ApiError(response.status, { type: "http", ...problem, message });
}

export async function get(path, options) {
  return (await call("GET", path, options)).json();
}

export async function send(method, path, body, options) {
  const response = await call(method, path, { ...options, body });
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

// ---- server-sent events

// Yields `{event, data, id}` of a response's body; `data` is text.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let fields = { event: "message", data: [], id: null };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (let line of lines) {
        line = line.replace(/\r$/, "");
        if (!line) {
          if (fields.data.length) yield { ...fields, data: fields.data.join("\n") };
          fields = { event: "message", data: [], id: null };
        } else if (!line.startsWith(":")) {
          const [, name, rest] = /^([^:]*):? ?(.*)$/.exec(line);
          if (name === "data") fields.data.push(rest);
          else if (name in fields) fields[name] = rest;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Calls `onEvent(data, event)` for each event of `path`, with its JSON parsed, until `signal` is
// aborted. Connects again after failures, with growing pauses. `path` may be a function, asked at
// each connection. `onState(state, error)`: "connecting", "open", "waiting".
export async function stream(path, onEvent, signal, onState = () => {}) {
  let pause = LEAST_PAUSE_MS;
  while (!signal.aborted) {
    onState("connecting");
    try {
      const at = typeof path === "function" ? path() : path;
      const response = await call("GET", at, { signal, headers: { Accept: "text/event-stream" } });
      onState("open");
      for await (const { event, data } of eventsOf(response)) {
        pause = LEAST_PAUSE_MS;
        onEvent(JSON.parse(data), event);
      }
      onState("waiting", new ApiError(0, { message: "The router closed the stream." }));
    } catch (error) {
      if (signal.aborted) return;
      const known = error instanceof ApiError;
      onState("waiting", known ? error : new ApiError(0, { message: "The connection was lost." }));
    }
    await sleep(pause * (0.75 + Math.random() / 2), signal);
    pause = Math.min(2 * pause, MOST_PAUSE_MS);
  }
}

export function sleep(ms, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", done);
  });
}
