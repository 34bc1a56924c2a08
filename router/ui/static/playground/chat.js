// One answer of the router, streamed, with the time at which each piece came.
import { ApiError, call, eventsOf, get, sleep } from "../api.js";

const TRIES = 8; // for the receipt, which is complete shortly after the stream

// Streams the answer to `messages`. Calls `onChange(run)` whenever there is more, and returns the
// whole run: {id, text, tokens: [{text, at, count}], usage, finish, error, began, ended}. Times are
// milliseconds, `at` since the request was sent.
export async function ask(body, signal, onChange) {
  const run = { id: "", text: "", tokens: [], usage: null, finish: null, error: null, began: performance.now(), ended: null };
  const told = () => onChange({ ...run, tokens: [...run.tokens] });
  try {
    const response = await call("POST", "v1/chat/completions", { body, signal });
    run.id = response.headers.get("X-Request-Id") ?? "";
    told();
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(200, event.error);
      if (event.usage) run.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (choice.finish_reason) run.finish = choice.finish_reason;
      const text = choice.delta?.content ?? "";
      const count = choice.token_ids?.length ?? (text ? 1 : 0);
      if (text || count) run.tokens.push({ text, count, at: performance.now() - run.began });
      run.text += text;
      told();
    }
  } catch (error) {
    if (signal.aborted) run.finish ??= "stopped";
    else run.error = error instanceof ApiError ? error : new ApiError(0, { message: "The connection was lost." });
  }
  run.ended = performance.now() - run.began;
  told();
  return run;
}

// The receipt of a request, once it has ended. Throws ApiError.
export async function receiptOf(id, signal) {
  const path = `admin/requests/${id.split("/").map(encodeURIComponent).join("/")}`;
  for (let tried = 1; ; tried++) {
    const receipt = await get(path, { signal, ask: false });
    if (receipt.status !== "running" || tried === TRIES) return receipt;
    await sleep(100 * tried, signal);
  }
}

// What the times of a run's tokens say: milliseconds, and tokens per second.
export function timing({ tokens, ended }) {
  if (!tokens.length) return { first: null, gaps: [], rate: null, tokens: 0 };
  // Tokens that come together share the time since the ones before.
  const gaps = tokens.slice(1).flatMap(({ at, count }, i) => Array(Math.max(1, count)).fill((at - tokens[i].at) / Math.max(1, count)));
  const sorted = [...gaps].sort((one, other) => one - other);
  const rank = (share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)] : null);
  const span = tokens.at(-1).at - tokens[0].at;
  return {
    first: tokens[0].at,
    gaps,
    p50: rank(0.5),
    p99: rank(0.99),
    rate: span > 0 ? (1e3 * gaps.length) / span : null,
    total: ended ?? tokens.at(-1).at,
    tokens: gaps.length + Math.max(1, tokens[0].count),
  };
}
