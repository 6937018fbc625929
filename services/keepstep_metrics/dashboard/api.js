// Talking to the service: requests with the token, and the stream that comes back by itself.

const SILENCE = 25_000; // ms; the service pings every 10 s
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5_000;
const REQUEST = 20_000;

/** What went wrong with a request, in words for people. `status` is 0 where the service did not say it. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** `ask(why)`: resolves with a token when the service wants one, or with null. `renewed()`: it is another one now. */
export class Api {
  constructor(ask, renewed) {
    this.ask = ask;
    this.renewed = renewed;
  }

  get token() {
    return sessionStorage.getItem("keepstep-token");
  }

  set token(value) {
    if (!value || value === this.token) return;
    sessionStorage.setItem("keepstep-token", value);
    this.renewed();
  }

  async get(path, query = {}, signal) {
    const given = Object.entries(query).filter(([, value]) => value != null);
    return this.json(`${path}?${new URLSearchParams(given)}`, {}, signal);
  }

  async post(path, body) {
    const headers = { "Content-Type": "application/json" };
    return this.json(path, { method: "POST", headers, body: JSON.stringify(body) });
  }

  async json(path, options, signal) {
    try {
      return await (await this.send(path, options, () => within(REQUEST, signal))).json();
    } catch (error) {
      throw explained(error);
    }
  }

  /** A response that is not an error. Asks for a token as long as the service says 401; `limit()` is the signal of one try. */
  async send(path, options, limit) {
    for (;;) {
      const used = this.token;
      const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
      const response = await fetch(path, { ...options, headers, signal: limit() });
      if (response.ok) return response;
      const problem = await response.json().catch(() => ({}));
      if (response.status !== 401) throw new ApiError(response.status, problem.detail || `${response.status} ${response.statusText}`);
      if (this.token === used) this.token = await this.ask(used ? problem.detail : "");
    }
  }

  /**
   * Follows server-sent events until `signal`, while the page can be seen: `heard(kind, data)` for each; `live(true)`
   * when connected, and `live(false, milliseconds until the next try, why if the service said so)` when not.
   */
  async follow(path, { heard, live, signal }) {
    let last = "";
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      await seen(signal); // a browser has six connections to a service: a tab in the background leaves its own to others
      let cut, spoken;
      let why = "";
      const limit = () => {
        cut = new AbortController();
        spoken = Date.now();
        document.addEventListener("visibilitychange", () => cut.abort(), { signal: cut.signal });
        return AbortSignal.any([signal, cut.signal]);
      };
      // By the wall clock: timers stand still while a laptop sleeps, and its connections die then.
      const watch = setInterval(() => Math.abs(Date.now() - spoken) > SILENCE && cut.abort(), 1000);
      try {
        const response = await this.send(path, { headers: last ? { "Last-Event-ID": last } : {} }, limit);
        if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) throw explained(new SyntaxError());
        live(true);
        for await (const message of messages(response.body)) {
          spoken = Date.now();
          pause = FIRST_PAUSE;
          if (message.id) last = message.id;
          if (message.event !== "ping") heard(message.event, JSON.parse(message.data));
        }
      } catch (error) {
        if (error instanceof ApiError) why = error.message;
        else if (!(error instanceof TypeError || error.name === "AbortError")) console.error(error);
      } finally {
        clearInterval(watch);
        cut.abort(); // what could not be read is not left open
      }
      if (signal.aborted) return;
      live(false, pause, why);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}

/** Resolves when the page can be seen, or is left. */
function seen(signal) {
  if (!document.hidden) return null;
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
    signal.addEventListener("abort", resolve, { once: true });
  });
}

function explained(error) {
  if (error instanceof ApiError || error.name === "AbortError") return error;
  if (error.name === "TimeoutError") return new ApiError(0, `The metrics service did not answer within ${REQUEST / 1000} s.`);
  if (error instanceof SyntaxError) return new ApiError(0, "What answered is not the metrics service: it sent no JSON. Is there a proxy before it?");
  return new ApiError(0, "The metrics service does not answer.");
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
