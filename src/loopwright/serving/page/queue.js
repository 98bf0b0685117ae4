// What runs and what waits, in the server's order, each with what it is doing and a way to stop it.
//
//     const queue = new Queue(document.getElementById("queue"), library, actions);
//     queue.draw()

import { button, element } from "./element.js";
import { doing } from "./words.js";

export class Queue {
  rows = new Map();

  constructor(root, library, actions) {
    Object.assign(this, { root, library, actions });
    this.list = root.querySelector("ol");
  }

  draw() {
    const waiting = this.library.waiting;
    this.root.hidden = waiting.length === 0;
    for (const [id, row] of this.rows) {
      if (!waiting.some((record) => record.id === id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    for (const record of waiting) this.#draw(record);
  }

  #draw(record) {
    const row = this.rows.get(record.id) ?? this.#add(record);
    const live = this.library.live.get(record.id);
    row.meter.value = live?.progress ?? record.progress;
    const line = doing(record, live);
    if (row.line.textContent !== line) row.line.textContent = line;
  }

  #add(record) {
    const { id, prompt } = record;
    const meter = element("progress", { max: 100, "aria-label": `Progress of ${prompt}` });
    const line = element("span", { className: "hint" });
    const open = button(prompt, () => this.actions.show(id), { className: "prompt link" });
    const stop = button("Cancel", () => this.actions.cancel(id), { "aria-label": `Cancel ${prompt}` });
    const made = { meter, line, element: element("li", {}, open, stop, meter, line) };
    this.rows.set(id, made);
    this.list.append(made.element);
    return made;
  }
}
