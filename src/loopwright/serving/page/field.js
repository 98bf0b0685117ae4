// One parameter as a field, from its JSON schema: its type, default, limits and choices.
//
//     const field = new Field("height", { type: "integer", default: 64, minimum: 16, multipleOf: 16 });
//     form.append(field.element);
//     field.value                                // "64"; "" leaves it to the model

import { element } from "./element.js";
import { label } from "./words.js";

const AUTOMATIC = "automatic";
const LONG = 1000; // characters; what may be longer gets more than a line

export class Field {
  constructor(name, schema, id = `field-${name}`) {
    this.name = name;
    this.preset = schema.default ?? "";
    this.input = control(schema);
    this.input.id = id;
    this.input.setAttribute("aria-describedby", `${id}-note`);
    this.hint = hint(schema);
    this.note = element("p", { id: `${id}-note`, className: "hint" }, this.hint);
    this.element = element("div", { className: this.input.rows ? "field wide" : "field", title: name },
      element("label", { htmlFor: id }, label(name)), this.input, this.note);
    this.input.addEventListener("input", () => this.clear());
    this.reset();
  }

  get value() {
    return this.input.value;
  }

  set value(value) {
    this.input.value = value ?? "";
    this.clear();
  }

  // Whether there is something to tell the server that it would not do by itself.
  get given() {
    return this.value !== "" && this.value !== String(this.preset);
  }

  // What the browser finds wrong with it; "" for nothing.
  get problem() {
    return this.input.disabled ? "" : this.input.validationMessage;
  }

  reset() {
    this.value = this.preset;
  }

  mark(message) {
    this.input.setAttribute("aria-invalid", "true");
    this.note.className = "refused";
    this.note.textContent = message;
  }

  clear() {
    this.input.removeAttribute("aria-invalid");
    this.note.className = "hint";
    this.note.textContent = this.hint;
  }
}

function control(schema) {
  const kinds = [schema.type].flat();
  if (schema.enum) {
    return element("select", {}, ...schema.enum.map((choice) => element("option", {}, String(choice))));
  }
  if (kinds.includes("integer") || kinds.includes("number")) return numeric(schema, kinds.includes("integer"));
  if (schema.maxLength > LONG) return element("textarea", { rows: 2, maxLength: schema.maxLength });
  return element("input", { type: "text", autocomplete: "off", placeholder: AUTOMATIC });
}

function numeric(schema, whole) {
  const step = schema.multipleOf ?? (whole ? 1 : "any");
  return element("input", {
    type: "number",
    inputMode: whole ? "numeric" : "decimal",
    step,
    min: schema.minimum ?? schema.exclusiveMinimum,
    max: schema.maximum,
    placeholder: (schema.default ?? null) === null ? AUTOMATIC : "",
  });
}

function hint(schema) {
  if (schema.description) return schema.description;
  const { minimum: least, maximum: most, multipleOf: step } = schema;
  if (step) return `a multiple of ${step}`;
  return least !== undefined && most !== undefined && !schema.enum ? `${least} to ${most}` : "";
}
