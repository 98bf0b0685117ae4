// The page: a form, what it makes, the queue and the gallery, all told by one library.

import { askForKey, confirmed } from "./dialogs.js";
import { announce } from "./element.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { Library } from "./library.js";
import { Queue } from "./queue.js";
import { Server } from "./server.js";
import { Viewer } from "./viewer.js";
import { label } from "./words.js";

const at = (id) => document.getElementById(id);
const files = new Map(); // what was uploaded for a job, as long as this page is open
const FILE = "input_reference";

const server = new Server(askForKey);
const library = new Library(server);
const actions = { show, cancel, again, use, remove, older };
const viewer = new Viewer(at("viewer"), library, actions);
const queue = new Queue(at("queue"), library, actions);
const gallery = new Gallery(at("gallery"), library, actions);
let form;

async function begin() {
  const models = await server.models();
  at("serving").textContent = models.map(({ id, device }) => `${id} on ${device}`).join(", ");
  form = new Form(at("form"), models);
  form.root.onsubmit = submit;
  library.addEventListener("change", draw);
  library.keepUp();
}

function draw() {
  viewer.draw();
  queue.draw();
  gallery.draw();
}

// Whatever the server refuses is shown where the form says such things.
async function attempt(work) {
  try {
    return await work();
  } catch (error) {
    form.refuse(error);
    return null;
  }
}

async function submit(event) {
  event.preventDefault();
  const bodies = form.requests();
  if (bodies === null) return;
  const send = form.root.querySelector("button[type=submit]");
  send.disabled = true;
  await attempt(() => make(bodies, form.comparing ? form.varied.value : null));
  send.disabled = false;
}

async function make(bodies, varied = null) {
  const records = [];
  for (const body of bodies) records.push(await create(body));
  const captions = varied ? records.map(({ parameters }) => `${label(varied)}: ${parameters[varied]}`) : [];
  viewer.show(records.map(({ id }) => id), captions);
  at("viewer").scrollIntoView({ block: "nearest" });
  announce("Queued.");
}

async function create(body) {
  const record = await library.create(body);
  if (body.has(FILE)) files.set(record.id, body.get(FILE));
  return record;
}

function show(id) {
  viewer.show([id]);
  at("viewer").scrollIntoView({ block: "nearest" });
}

async function cancel(id) {
  await attempt(() => library.cancel(id));
  holdFocus();
}

// Where the button that was pressed has gone, the focus stays close by.
function holdFocus() {
  if (document.activeElement === document.body) at("results").focus({ preventScroll: true });
}

// The very request, seed included: the same model gives the same bytes.
function again(record) {
  const body = new FormData();
  const { task, image, video, output, ...parameters } = record.parameters;
  if ((image ?? video ?? null) !== null && !files.has(record.id)) return use(record);
  const known = form.models.find(({ id }) => id === record.model)?.parameters[task].properties ?? {};
  for (const [name, value] of Object.entries({ model: record.model, task, prompt: record.prompt })) body.set(name, value);
  for (const name of Object.keys(known)) {
    if (name !== "prompt" && (parameters[name] ?? null) !== null) body.set(name, parameters[name]);
  }
  if (files.has(record.id)) body.set(FILE, files.get(record.id));
  return attempt(() => make([body]));
}

function use(record) {
  form.fill(record);
  form.root.scrollIntoView({ block: "start" });
}

async function remove(record) {
  if (await confirmed(`Delete “${record.prompt}” and its file?`, "Delete")) await attempt(() => library.remove(record.id));
  holdFocus();
}

function older() {
  return attempt(() => library.older());
}

begin().catch((error) => {
  at("refused").textContent = error.message;
});
