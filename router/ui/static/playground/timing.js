// The times of an answer's tokens as bars: the first one's, then the gaps between them.
import { html } from "../lib.js";
import { count, ms } from "../format.js";
import { Stat } from "../parts.js";
import { timing } from "./chat.js";

const WIDTH = 600;
const HEIGHT = 110;
const MOST_BARS = 300; // more gaps share bars, which show the longest of them

export function TokenTiming({ run }) {
  const { first, gaps, p50, p99, rate, tokens } = timing(run);
  return html`
    <div class="stats stats-small">
      <${Stat} label="First token" value=${ms(first)} />
      <${Stat} label="Per token, p50" value=${ms(p50)} />
      <${Stat} label="Per token, p99" value=${ms(p99)} />
      <${Stat} label="Tokens per second" value=${count(rate)} />
    </div>
    <${Bars} gaps=${gaps} tokens=${tokens} p50=${p50} />
  `;
}

function Bars({ gaps, tokens, p50 }) {
  if (!gaps.length) return html`<p class="note">The bars appear as tokens come.</p>`;
  const each = Math.ceil(gaps.length / MOST_BARS);
  const bars = [];
  for (let at = 0; at < gaps.length; at += each) bars.push(Math.max(...gaps.slice(at, at + each)));
  // The longest gaps would press the others flat: the axis ends at a multiple of the usual one.
  const most = Math.max(Math.min(Math.max(...bars), 6 * Math.max(p50, 0.1)), 0.1);
  const step = WIDTH / Math.max(bars.length, 24);
  const y = (value) => HEIGHT - (HEIGHT * Math.min(value, most)) / most;
  return html`<figure class="token-chart">
    <figcaption class="row row-between note"><span>Time between tokens</span><span class="num">up to ${ms(most)}</span></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img"
      aria-label=${`Time between ${count(tokens)} tokens: ${ms(p50)} in the middle, ${ms(Math.max(...bars))} at most`}>
      ${bars.map(
        (value, at) => html`<rect key=${at} class=${value > most ? "bar-cut" : "bar-gap"} x=${at * step} width=${Math.max(step - 1, 0.6)}
          y=${y(value)} height=${Math.max(1, HEIGHT - y(value))}><title>Token ${at * each + 2}: ${ms(value)}</title></rect>`,
      )}
      <line class="bar-middle" x1="0" x2=${WIDTH} y1=${y(p50)} y2=${y(p50)} />
    </svg>
    <p class="row row-between note"><span>token 2</span><span>p50 ${ms(p50)}</span><span>${count(tokens)}</span></p>
  </figure>`;
}
