import { html } from "../lib.js";

export default { name: "strategies", title: "Strategies", View: () => html`<p>…</p>` };
