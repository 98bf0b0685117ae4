// What this server has made and is making, as the page knows it; `change` is told whenever that changes.
//
//     const library = new Library(server);
//     library.addEventListener("change", draw);
//     library.finished                            // newest first

import { announce } from "./element.js";
import { stage } from "./words.js";

const WATCHED = 3; // live connections; a browser opens six to a server, and the rest are for asking
const OPEN = ["queued", "in_progress"];
const SOON = 2000;
const LATER = 15000;
const PAGE = 100;

export class Library extends EventTarget {
  records = new Map();
  live = new Map(); // what the last event of a job has told
  more = false;
  #watched = new Set();
  #addresses = new Map();

  constructor(server) {
    super();
    this.server = server;
  }

  get all() {
    return [...this.records.values()].sort((a, b) => b.created_at - a.created_at || b.order - a.order);
  }

  get finished() {
    return this.all.filter((record) => record.status === "completed");
  }

  get waiting() {
    return this.all.filter((record) => OPEN.includes(record.status)).reverse();
  }

  // Look at the server from time to time; it may have other clients.
  async keepUp() {
    for (;;) {
      if (!document.hidden) await this.refresh().catch((error) => announce(error.message));
      const pause = this.waiting.length ? SOON : LATER;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async refresh() {
    const page = await this.server.list(PAGE);
    const gone = this.waiting.filter(({ id }) => !page.data.some((record) => record.id === id));
    for (const { id } of gone) this.#watch(id);
    this.more ||= page.has_more && this.records.size === 0;
    this.#keep(page.data);
  }

  async older() {
    const page = await this.server.list(PAGE, this.all.at(-1).id);
    this.more = page.has_more;
    this.#keep(page.data);
  }

  async create(form) {
    const record = await this.server.create(form);
    this.#keep([record]);
    return record;
  }

  async cancel(id) {
    this.#keep([await this.server.cancel(id)]);
  }

  async remove(id) {
    await this.server.remove(id);
    this.records.delete(id);
    this.#release(id);
    this.#changed();
  }

  // The address of a result's file inside this page.
  address(id) {
    if (!this.#addresses.has(id)) {
      this.#addresses.set(id, this.server.content(id).then((blob) => URL.createObjectURL(blob)));
    }
    return this.#addresses.get(id);
  }

  #release(id) {
    this.#addresses.get(id)?.then((address) => URL.revokeObjectURL(address));
    this.#addresses.delete(id);
  }

  // Lists come newest first, and times of creation are whole seconds: the place in the list decides between equals.
  #keep(records) {
    for (const record of [...records].reverse()) {
      const known = this.records.get(record.id);
      this.records.set(record.id, { ...record, order: known?.order ?? this.records.size });
    }
    this.#changed();
    for (const { id } of this.waiting.slice(0, WATCHED)) this.#watch(id);
  }

  async #watch(id) {
    if (this.#watched.has(id)) return;
    this.#watched.add(id);
    try {
      for await (const event of this.server.events(id)) this.#hear(id, event);
      this.#keep([await this.server.get(id)]);
      this.#tellEnd(this.records.get(id));
    } catch (error) {
      if (error.status === 404) this.records.delete(id);
      else announce(error.message);
    } finally {
      this.#watched.delete(id);
      this.#changed();
    }
  }

  #hear(id, event) {
    const before = this.live.get(id);
    this.live.set(id, event.type === "stage" ? { ...event, progress: before?.progress } : { ...before, ...event });
    const record = this.records.get(id);
    if (event.type === "stage" && record) announce(`${stage(event.stage)}: ${record.prompt}`);
    this.#changed();
  }

  #tellEnd(record) {
    this.live.delete(record.id);
    if (!OPEN.includes(record.status)) announce(`${record.status}: ${record.prompt}`);
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}
