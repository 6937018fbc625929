// Talking to the service: requests with the token, and the stream that comes back by itself.

const SILENCE = 25_000; // ms; the service pings every 10 s
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5_000;
const REQUEST = 20_000;

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** `ask(why)`: resolves with a token when the service wants one. */
export class Api {
  constructor(ask) {
    this.ask = ask;
    this.asking = null;
  }

  get token() {
    return sessionStorage.getItem("keepstep-token");
  }

  set token(value) {
    if (value) sessionStorage.setItem("keepstep-token", value);
    else sessionStorage.removeItem("keepstep-token");
  }

  async get(path, query = {}, signal) {
    const given = Object.entries(query).filter(([, value]) => value != null);
    return (await this.send(`${path}?${new URLSearchParams(given)}`, {}, () => within(REQUEST, signal))).json();
  }

  async post(path, body) {
    const headers = { "Content-Type": "application/json" };
    return (await this.send(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  /** A response that is not an error. Asks for a token as long as the service says 401; `limit()` is the signal of one try. */
  async send(path, options, limit = () => within(REQUEST)) {
    for (;;) {
      const used = this.token;
      const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
      const response = await fetch(path, { ...options, headers, signal: limit() });
      if (response.ok) return response;
      const problem = await response.json().catch(() => ({}));
      if (response.status !== 401) throw new ApiError(response.status, problem.detail || `${response.status} ${response.statusText}`);
      if (this.token === used) {
        this.asking ??= this.ask(used ? problem.detail : "").finally(() => (this.asking = null));
        this.token = await this.asking;
      }
    }
  }

  /**
   * Follows server-sent events until `signal`: `heard(kind, data)` for each; `live(true)` when connected, and
   * `live(false, milliseconds until the next try)` when not.
   */
  async follow(path, { heard, live, signal }) {
    let last = "";
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      let silent, timer;
      const heardNow = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(), SILENCE);
      };
      const limit = () => {
        silent = new AbortController();
        heardNow();
        return AbortSignal.any([signal, silent.signal]);
      };
      try {
        const response = await this.send(path, { headers: last ? { "Last-Event-ID": last } : {} }, limit);
        live(true);
        for await (const message of messages(response.body)) {
          heardNow();
          pause = FIRST_PAUSE;
          if (message.id) last = message.id;
          if (message.event !== "ping") heard(message.event, JSON.parse(message.data));
        }
      } catch (error) {
        if (!(error instanceof TypeError || error instanceof ApiError || error.name === "AbortError")) console.error(error);
      } finally {
        clearTimeout(timer);
      }
      if (signal.aborted) return;
      live(false, pause);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}

const within = (milliseconds, signal) => AbortSignal.any([AbortSignal.timeout(milliseconds), ...(signal ? [signal] : [])]);

/** Server-sent events of a body: {event, id, data}. */
async function* messages(body) {
  let message = { event: "message", id: "", data: [] };
  for await (const line of lines(body)) {
    if (line === "") {
      if (message.data.length) yield { ...message, data: message.data.join("\n") };
      message = { event: "message", id: "", data: [] };
      continue;
    }
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "data") message.data.push(value);
    else if (name === "event" || name === "id") message[name] = value;
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n/);
    rest = parts.pop();
    yield* parts;
  }
}
