// The server's API, as far as this page uses it. Nothing else is ever asked.
//
//     const server = new Server(askForKey);      // askForKey() resolves to a key when the server wants one
//     const record = await server.create(new FormData(form));
//     for await (const event of server.events(record.id)) ...

const KEY = "loopwright.key";

export class ServerError extends Error {
  constructor(message, { param = null, status = 0 } = {}) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

export class Server {
  #asking = null;

  constructor(askForKey) {
    this.askForKey = askForKey;
  }

  async models() {
    return (await this.#json("/v1/models")).data;
  }

  create(form) {
    return this.#json("/v1/videos", { method: "POST", body: form });
  }

  get(id) {
    return this.#json(`/v1/videos/${encodeURIComponent(id)}`);
  }

  list(limit, after = null) {
    const query = new URLSearchParams({ limit, ...(after && { after }) });
    return this.#json(`/v1/videos?${query}`);
  }

  cancel(id) {
    return this.#json(`/v1/videos/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  }

  remove(id) {
    return this.#json(`/v1/videos/${encodeURIComponent(id)}`, { method: "DELETE" });
  }

  async content(id) {
    return (await this.#ask(`/v1/videos/${encodeURIComponent(id)}/content`)).blob();
  }

  // What a job under way will be, as a picture.
  async preview(id) {
    return (await this.#ask(`/v1/videos/${encodeURIComponent(id)}/preview`)).blob();
  }

  // What happens to a job, from its beginning, until its end or the connection's.
  async *events(id) {
    const answer = await this.#ask(`/v1/videos/${encodeURIComponent(id)}/events`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (text + part.value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "));
        if (data) yield JSON.parse(data.slice(6)); // a comment only keeps the connection
      }
    }
  }

  async #json(path, options) {
    return JSON.parse(await (await this.#ask(path, options)).text(), exact);
  }

  async #ask(path, options = {}) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(path, { ...options, headers }).catch(() => {
      throw new ServerError("The server cannot be reached.");
    });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      await this.#unlock(key !== null);
      return this.#ask(path, options);
    }
    throw await told(answer);
  }

  // However many requests find the door locked, the key is asked for once.
  async #unlock(wrong) {
    this.#asking ??= this.askForKey(wrong).then((key) => {
      sessionStorage.setItem(KEY, key);
      this.#asking = null;
    });
    await this.#asking;
  }
}

async function told(answer) {
  const { error } = await answer.json().catch(() => ({ error: null }));
  const message = error?.message ?? `The server answered ${answer.status}.`;
  return new ServerError(message, { param: error?.param, status: answer.status });
}

// Whole numbers that JavaScript would round (seeds) stay as they were written.
function exact(name, value, context) {
  const rounded = Number.isInteger(value) && !Number.isSafeInteger(value);
  return rounded ? (context?.source ?? value) : value;
}
