import { html } from "../lib.js";

export default { name: "playground", title: "Playground", View: () => html`<p>…</p>` };
