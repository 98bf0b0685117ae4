// The form: what to make, built from what the chosen model says that it takes.
//
//     const form = new Form(document.getElementById("form"), models);
//     form.requests()                            // one FormData, or two that differ in one setting
//     form.fill(record)                          // the settings of a result

import { element } from "./element.js";
import { Field } from "./field.js";
import { label } from "./words.js";

const FRONT = ["width", "height", "num_frames", "num_inference_steps", "guidance_scale", "seed"];
const MOVING = ["num_frames", "fps"]; // of no use to a picture
const FILE = "input_reference";

export class Form {
  constructor(root, models) {
    this.root = root;
    this.models = models;
    this.front = root.querySelector("#front");
    this.more = root.querySelector("#more");
    this.compare = root.querySelector("#compare");
    this.refused = root.querySelector("#refused");
    this.model = select("model", models.map((model) => [model.id, model.id]));
    this.task = select("task", []);
    this.kind = select("kind", [["video", "Video"], ["picture", "Picture"]]);
    this.varied = select("setting", []);
    this.file = element("input", { type: "file", id: "field-file" });
    this.prompt = new Field("prompt", { type: "string", maxLength: 8192 });
    this.#place();
    this.#choose();
  }

  get chosen() {
    return this.models.find((model) => model.id === this.model.value);
  }

  get comparing() {
    return this.compare.open;
  }

  #place() {
    const fileRow = row("File", this.file);
    this.fileRow = fileRow;
    this.taskRow = row("From", this.task);
    this.kindRow = row("Make a", this.kind);
    this.modelRow = row("Model", this.model);
    this.modelRow.hidden = this.models.length < 2;
    this.prompt.input.rows = 3;
    this.prompt.input.required = true;
    this.prompt.input.placeholder = "a fox moving left on a blue background";
    const choices = element("div", { className: "fields" }, this.modelRow, this.kindRow, this.taskRow, fileRow);
    this.root.querySelector("#basics").append(this.prompt.element, choices);
    this.model.onchange = () => this.#choose();
    this.task.onchange = () => this.#build();
    this.kind.onchange = () => this.#picture();
    this.varied.onchange = () => this.#vary();
    this.compare.ontoggle = () => this.#label();
    this.prompt.input.onkeydown = (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.root.requestSubmit();
    };
    this.root.onreset = (event) => {
      event.preventDefault();
      this.#build();
      this.prompt.value = "";
      this.prompt.input.focus();
    };
  }

  #choose() {
    fillChoices(this.task, Object.entries(this.chosen.tasks).map(([name, { inputs }]) => [name, source(inputs)]));
    this.taskRow.hidden = this.task.options.length < 2;
    this.#build();
  }

  #build() {
    this.schema = this.chosen.parameters[this.task.value].properties;
    const names = Object.keys(this.schema).filter((name) => name !== "prompt");
    this.prompt.input.maxLength = this.schema.prompt.maxLength;
    this.fields = Object.fromEntries(names.map((name) => [name, new Field(name, this.schema[name])]));
    this.fields.prompt = this.prompt;
    const front = FRONT.filter((name) => name in this.schema);
    this.front.replaceChildren(...front.map((name) => this.fields[name].element));
    const rest = names.filter((name) => !FRONT.includes(name));
    this.more.querySelector(".fields").replaceChildren(...rest.map((name) => this.fields[name].element));
    this.#takes(this.chosen.tasks[this.task.value].inputs[0]);
    fillChoices(this.varied, [...front, ...rest].filter((name) => name !== "seed").map((name) => [name, label(name)]));
    if ("num_inference_steps" in this.schema) this.varied.value = "num_inference_steps";
    this.#vary();
    this.#picture();
    this.#refuse("");
  }

  #takes(input) {
    this.fileRow.hidden = !input;
    this.file.accept = input === "video" ? "video/mp4,video/webm,image/*" : "image/*";
    this.file.value = "";
    this.fileRow.querySelector("label").textContent = input === "video" ? "Video to change" : "First frame";
  }

  #picture() {
    const still = this.kind.value === "picture";
    for (const name of MOVING.filter((name) => name in this.fields)) {
      this.fields[name].element.hidden = still;
      this.fields[name].input.disabled = still;
    }
  }

  #vary() {
    const name = this.varied.value;
    this.second = new Field(name, this.schema[name], "field-second");
    this.second.element.querySelector("label").textContent = "Second value";
    this.compare.querySelector(".fields").replaceChildren(row("Setting", this.varied), this.second.element);
  }

  #label() {
    this.root.querySelector("button[type=submit]").textContent = this.comparing ? "Make both" : "Make it";
  }

  // What to send, once the browser finds nothing wrong; null otherwise.
  requests() {
    this.#refuse("");
    for (const field of Object.values(this.fields)) field.clear();
    const wrong = [...Object.values(this.fields), ...(this.comparing ? [this.second] : [])].find((f) => f.problem);
    if (wrong) return this.#mark(wrong, wrong.problem);
    const first = this.#request();
    if (!this.comparing) return [first];
    if (!first.has("seed")) first.set("seed", crypto.getRandomValues(new Uint32Array(1))[0]);
    const second = new FormData();
    for (const [name, value] of first) if (name !== this.second.name) second.append(name, value);
    if (this.second.value !== "") second.set(this.second.name, this.second.value);
    return [first, second];
  }

  #request() {
    const body = new FormData();
    body.set("model", this.model.value);
    body.set("task", this.task.value);
    body.set("prompt", this.prompt.value);
    const fields = Object.values(this.fields).filter((field) => field.given && !field.input.disabled);
    for (const field of fields) body.set(field.name, field.value);
    if (this.kind.value === "picture") body.set("num_frames", "1");
    if (this.file.files.length) body.set(FILE, this.file.files[0]);
    return body;
  }

  // Show what the server has refused, at the field that it is about.
  refuse(error) {
    const field = this.fields[error.param];
    if (field && !field.input.disabled) this.#mark(field, error.message);
    else this.#refuse(error.message);
  }

  #mark(field, message) {
    field.mark(message);
    const folded = field.element.closest("details");
    if (folded) folded.open = true;
    field.input.focus();
    return null;
  }

  #refuse(message) {
    this.refused.textContent = message;
    if (message) this.refused.scrollIntoView({ block: "nearest" });
  }

  // The settings of a result, as the form's.
  fill(record) {
    if (!this.models.some((model) => model.id === record.model)) {
      this.#refuse(`${record.model} is not served any more.`);
      return;
    }
    this.model.value = record.model;
    this.#choose();
    this.task.value = record.parameters.task;
    this.#build();
    this.kind.value = record.parameters.num_frames === 1 ? "picture" : "video";
    for (const [name, field] of Object.entries(this.fields)) {
      if (name in record.parameters) field.value = record.parameters[name];
    }
    this.prompt.value = record.prompt;
    if (this.kind.value === "picture") this.fields.num_frames.reset();
    this.#picture();
    if (!this.fileRow.hidden) this.#refuse("Choose the file again; pages cannot keep one.");
    this.prompt.input.focus();
  }
}

function select(name, choices) {
  const made = element("select", { id: `field-${name}` });
  fillChoices(made, choices);
  return made;
}

function fillChoices(made, choices) {
  made.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
}

function row(text, input) {
  return element("div", { className: "field" }, element("label", { htmlFor: input.id }, text), input);
}

function source(inputs) {
  return inputs.length ? `Words and ${inputs.map((name) => `a ${name}`).join(", ")}` : "Words alone";
}
