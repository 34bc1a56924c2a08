// A receipt in words: [{at, text, tone}], sorted by time in ms since the request arrived.
import { bytes, count, ms } from "../format.js";

// Nothing has failed: the client went away, or the engine is drained and the request moves.
export const calm = (error) => error.type === "cancelled" || error.type === "draining";

const tokens = (number) => `${count(number)} token${number === 1 ? "" : "s"}`;

function ofLeg(leg) {
  const { call, engine, to, begin, end, ms: took, error } = leg;
  const lasted = took === null ? "" : ` in ${ms(took)}`;
  if (error?.type === "cancelled") return { text: `${call} on ${engine} was cancelled${took === null ? "" : ` after ${ms(took)}`}` };
  if (error) return { text: `${call} on ${engine} ${calm(error) ? "ended" : "failed"}: ${error.type}: ${error.message}`, tone: calm(error) ? "warn" : "bad" };
  if (call === "prep_recv") {
    if (took === null) return { text: `${engine} is asked for room for ${tokens(end)}` };
    const cached = leg.match_len ? `, of which ${count(leg.match_len)} are cached there` : "";
    return { text: `${engine} reserved room for ${tokens(end)}${cached}` };
  }
  if (call === "remote_send") {
    if (leg.collapsed) return { text: `${engine} is the receiver itself: nothing is sent` };
    if (took === null) return { text: `${engine} computes ${tokens(end - begin)} and puts them at ${to ?? "the receiver"}` };
    if (!leg.sent_tokens) return { text: `${engine} had nothing to send` };
    const did = [
      leg.computed_tokens && `computed ${tokens(leg.computed_tokens)}`,
      leg.cached_tokens && `had ${tokens(leg.cached_tokens)} cached`,
    ].filter(Boolean).join(", ");
    const rest = leg.put_ms ? `; ${ms(leg.put_ms)} of it only for puts that computing did not hide` : "";
    return { text: `${engine} ${did ? `${did} and ` : ""}put ${tokens(leg.sent_tokens)} (${bytes(leg.bytes)}) at ${to ?? "the receiver"}${lasted}${rest}` };
  }
  if (call === "start_generate") {
    const again = leg.recomputed_tokens === null ? "" : `, computing ${tokens(leg.recomputed_tokens)} again`;
    const first = leg.first_token_ms === null ? "" : `, the first after ${ms(leg.first_token_ms)}`;
    const copy = leg.replica ? `, with a replica at ${leg.replica}` : "";
    const resumed = leg.recomputed_tokens === null ? "" : "resumed: ";
    if (took === null) return { text: `${resumed}${engine} generates from position ${begin}${copy}${again}: ${tokens(leg.tokens)} so far${first}` };
    return { text: `${resumed}${engine} generated ${tokens(leg.tokens)} from position ${begin}${copy}${again}${lasted}${first}` };
  }
  return { text: `${call} on ${engine}${lasted}` };
}

export function told(receipt) {
  const lines = [
    { at: 0, text: `Arrived with ${tokens(receipt.prompt_tokens)}; strategy ${receipt.strategy}, generation ${receipt.generation}` },
    ...receipt.waiting.map(({ why, start_ms, ms: took }) => ({
      at: start_ms,
      text: took === null ? `waits ${why}` : `waited ${ms(took)} ${why}`,
      tone: "queue",
    })),
    ...receipt.legs.map((leg) => ({ at: leg.start_ms, ...ofLeg(leg) })),
    ...receipt.legs.filter(({ mirror_error }) => mirror_error).map((leg) => ({ at: leg.start_ms, text: `the replica of the generation on ${leg.engine} ended: ${leg.mirror_error}`, tone: "warn" })),
    ...receipt.retries.map(({ at_ms, after_tokens, error, engines }) => ({
      at: at_ms,
      text: `${calm(error) ? "Moves away" : "Goes on elsewhere"} after ${tokens(after_tokens)}${engines.length ? `, not on ${engines.join(", ")}` : ""}: ${error.message}`,
      tone: calm(error) ? undefined : "warn",
    })),
  ];
  if (receipt.ms !== null) {
    const ends = {
      done: `Done: ${tokens(receipt.completion_tokens)}`,
      failed: `Failed: ${receipt.error?.message ?? "no reason told"}`,
      cancelled: "Cancelled: the client went away",
    };
    lines.push({ at: receipt.ms, text: ends[receipt.status] ?? receipt.status, tone: { done: "good", failed: "bad" }[receipt.status] });
  }
  return lines.map((line, number) => ({ ...line, number })).sort((a, b) => a.at - b.at || a.number - b.number);
}
