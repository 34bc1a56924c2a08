import { html } from "../lib.js";

export default { name: "latency", title: "Latency", View: () => html`<p>…</p>` };
