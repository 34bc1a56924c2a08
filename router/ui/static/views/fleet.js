import { html } from "../lib.js";

export default { name: "fleet", title: "Fleet", View: () => html`<p>…</p>` };
