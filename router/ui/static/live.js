// The newest snapshot of the router, and the last ten minutes of them, shared by all views.
import { stream } from "./api.js";
import { useEffect, useState } from "./lib.js";

const KEPT = 600; // snapshots, one a second
const HIDDEN_MS = 60_000; // then a page that nobody sees listens no longer
const SLO = "microserve.slo";

const listeners = new Set();
let state = { now: null, ring: [], status: "connecting", error: null };
let connection = null;
let hidden = null;

// The objectives in ms by which goodput counts; null: any value meets them.
export const slo = {
  get() {
    try {
      return { ttft_ms: null, tpot_ms: null, ...JSON.parse(localStorage.getItem(SLO)) };
    } catch {
      return { ttft_ms: null, tpot_ms: null };
    }
  },
  set(objectives) {
    localStorage.setItem(SLO, JSON.stringify(objectives));
    restart();
  },
};

// Returns {now, ring, status, error}. `status` is "open" while snapshots come.
export function useLive() {
  const [seen, show] = useState(state);
  useEffect(() => {
    listeners.add(show);
    show(state);
    start();
    return () => {
      listeners.delete(show);
      if (!listeners.size) stop();
    };
  }, []);
  return seen;
}

function change(changes) {
  state = { ...state, ...changes };
  for (const show of listeners) show(state);
}

function start() {
  if (connection || document.hidden) return;
  connection = new AbortController();
  stream(path, taken, connection.signal, (status, error = null) => change({ status, error }));
}

function stop() {
  connection?.abort();
  connection = null;
}

function restart() {
  stop();
  if (listeners.size) start();
}

function path() {
  const objectives = slo.get();
  const query = new URLSearchParams();
  for (const name of ["ttft_ms", "tpot_ms"]) {
    if (objectives[name] > 0) query.set(`slo_${name}`, objectives[name]);
  }
  return `admin/live?${query}`;
}

function taken(snapshot) {
  const ring = [...state.ring.slice(1 - KEPT), snapshot];
  change({ now: snapshot, ring, error: null });
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(stop, HIDDEN_MS);
  else if (listeners.size) start();
});
