// The engines as nodes, and the KV that moves between them as arcs.
import { bytes, count } from "../format.js";
import { html } from "../lib.js";
import { useWidth } from "../parts.js";

const FADE = 4; // snapshots until an arc without new puts is gone
const NODE = { width: 158, height: 52, gap: 18 };
const ROOMY = 480; // px of width, below which arcs have no labels
const LABELS = 10; // arcs that have one: those that move most
const COLUMNS = ["prefill", "any", "decode"];

// Places each engine: [{id, x, y}], by role from left to right; engines for any role in two columns.
function placed(engines, width) {
  const columns = COLUMNS.map((role) => engines.filter((one) => one.role === role)).filter((column) => column.length);
  if (columns.length === 1) {
    const half = Math.ceil(engines.length / 2);
    columns.splice(0, 1, engines.slice(0, half), engines.slice(half));
  }
  const nodeWidth = Math.min(NODE.width, (width - 60) / columns.length - 12);
  const tallest = Math.max(...columns.map((column) => column.length));
  const height = tallest * (NODE.height + NODE.gap) + 8;
  const step = (width - nodeWidth - 8) / Math.max(columns.length - 1, 1);
  const nodes = columns.flatMap((column, number) => {
    const top = (height - column.length * (NODE.height + NODE.gap) + NODE.gap) / 2;
    return column.map((one, row) => ({
      one,
      column: number,
      x: 4 + number * step,
      y: top + row * (NODE.height + NODE.gap),
    }));
  });
  return { nodes, nodeWidth, height };
}

// What moved lately by pair: {from, to, bytes, calls, sending, mirrors, age}; age 0 is now.
function recent(ring) {
  const pairs = new Map();
  ring.slice(-FADE).reverse().forEach((snapshot, age) => {
    for (const flow of snapshot.flows) {
      const pair = JSON.stringify([flow.from, flow.to]);
      const fresh = flow.calls || flow.sending || (flow.mirrors && age === 0);
      if (fresh && !pairs.has(pair)) pairs.set(pair, { ...flow, age });
    }
  });
  return [...pairs.entries()].map(([key, flow]) => ({ key, ...flow }));
}

// A curve from one node to the other, and its middle.
function curve(from, to, width) {
  const right = to.column > from.column;
  const same = to.column === from.column;
  const x1 = from.x + (right || same ? width : 0);
  const x2 = to.x + (right ? 0 : width);
  const shift = right ? -7 : 7; // the two directions of a pair do not hide each other
  const y1 = from.y + NODE.height / 2 + shift;
  const y2 = to.y + NODE.height / 2 + shift;
  const bend = same ? 46 : Math.max(40, Math.abs(x2 - x1) / 2.2) * (right ? 1 : -1);
  const [c1, c2] = same ? [x1 + bend, x2 + bend] : [x1 + bend, x2 - bend];
  const at = (a, b, c, d, t) => (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t * t * c + t ** 3 * d;
  const t = from.y === to.y ? 0.64 : 0.33; // labels of crossing arcs lie apart
  return {
    path: `M${x1},${y1} C${c1},${y1} ${c2},${y2} ${x2},${y2}`,
    middle: [at(x1, c1, c2, x2, t), at(y1, y1, y2, y2, t)],
  };
}

function Arc({ flow, from, to, width, labelled }) {
  const { path, middle } = curve(from, to, width);
  const moves = flow.calls > 0 || flow.sending > 0;
  const opacity = 1 - flow.age / FADE; // of the line; its label stays readable
  const thick = 1.5 + Math.min(4, Math.log10(1 + flow.bytes / 1e4));
  const said = flow.calls ? `${bytes(flow.bytes)}/s` : moves ? `${count(flow.sending)} under way` : `${count(flow.mirrors)} mirrored`;
  return html`<g class=${moves ? "arc arc-moves" : "arc arc-mirror"}>
    <path d=${path} style=${{ strokeWidth: `${thick}px`, opacity }} class="arc-line" />
    ${moves && html`<path d=${path} style=${{ strokeWidth: `${thick / 2}px`, opacity }} class="arc-dots" />`}
    ${labelled && html`<text x=${middle[0]} y=${middle[1] - 6} text-anchor="middle">${said}</text>`}
    <title>${`${flow.from} to ${flow.to}: ${count(flow.calls)} sends, ${bytes(flow.bytes)}; ${count(flow.sending)} under way; ${count(flow.mirrors)} mirrored`}</title>
  </g>`;
}

function Node({ node: { one, x, y }, width }) {
  const used = one.pages ? (one.pages.total - one.pages.free) / Math.max(one.pages.total, 1) : 0;
  const busy = one.running + one.waiting;
  const room = Math.floor((width - 30) / 7.2);
  const name = one.id.length > room ? `${one.id.slice(0, room - 1)}…` : one.id;
  return html`<g class=${`node node-${one.role} node-${one.usable ? "up" : "off"}`} transform=${`translate(${x},${y})`}>
    <rect class="node-box" width=${width} height=${NODE.height} rx="9" />
    <rect class="node-role" width="4" height=${NODE.height - 16} x="8" y="8" rx="2" />
    <text class="node-name" x="20" y="21">${name}</text>
    <text class="node-note" x="20" y="36">${busy ? `${count(one.running)} running${one.waiting ? `, ${count(one.waiting)} waiting` : ""}` : one.usable ? "idle" : one.draining ? "draining" : one.status}</text>
    <rect class="node-pool" x="20" y="42" width=${width - 30} height="3" rx="1.5" />
    <rect class="node-used" x="20" y="42" width=${(width - 30) * used} height="3" rx="1.5" />
    <title>${`${one.id}: ${one.status}, ${Math.round(100 * used)} % of its pool in use`}</title>
  </g>`;
}

export function Flows({ now, ring }) {
  const [ref, width] = useWidth();
  const { nodes, nodeWidth, height } = placed(now.engines, Math.max(width, 260));
  const byId = new Map(nodes.map((node) => [node.one.id, node]));
  const flows = recent(ring)
    .filter(({ from, to }) => byId.has(from) && byId.has(to))
    .sort((a, b) => b.bytes - a.bytes);
  const said = flows.filter((flow) => flow.calls).map((flow) => `${flow.from} to ${flow.to} ${bytes(flow.bytes)}`);
  return html`<div ref=${ref} class="flows">
    ${width > 0 && html`<svg width=${width} height=${height} role="img" aria-label=${`KV between engines: ${said.join(", ") || "none moves now"}`}>
      ${flows.map((flow, rank) => html`<${Arc} key=${flow.key} labelled=${rank < LABELS && width >= ROOMY} flow=${flow} from=${byId.get(flow.from)} to=${byId.get(flow.to)} width=${nodeWidth} />`)}
      ${nodes.map((node) => html`<${Node} key=${node.one.url} node=${node} width=${nodeWidth} />`)}
    </svg>`}
  </div>`;
}
