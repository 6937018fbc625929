// Requests to the service with the token, and the event stream, which reconnects.

const SILENCE = 25_000; // ms; the service pings every 10 s
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5_000;
const REQUEST = 20_000;

/** An error of a request, with a message for operators. `status` is 0 without an answer of the service. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The service was not reached, or the connection broke. */
class Unreachable extends ApiError {
  constructor() {
    super(0, "The metrics service is unreachable.");
  }
}

/** `ask(why)` resolves with a token, or with null. `renewed()` is called when the token changes. */
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

  get(path, query = {}, signal) {
    const given = Object.entries(query).filter(([, value]) => value != null);
    return this.json(`${path}?${new URLSearchParams(given)}`, {}, signal);
  }

  post(path, body, method = "POST") {
    const headers = { "Content-Type": "application/json" };
    return this.json(path, { method, headers, body: JSON.stringify(body) });
  }

  async json(path, options, signal) {
    try {
      return await reached((await this.send(path, options, () => within(REQUEST, signal))).json());
    } catch (error) {
      throw explained(error);
    }
  }

  /** Returns a successful response. Asks for a token while the service answers 401. `limit()`: abort signal of one try. */
  async send(path, options, limit) {
    for (;;) {
      const used = this.token;
      const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
      const response = await reached(fetch(path, { ...options, headers, signal: limit() }));
      if (response.ok) return response;
      const problem = await response.json().catch(() => ({}));
      if (response.status !== 401) {
        throw new ApiError(response.status, problem.detail || `${response.status} ${response.statusText}`);
      }
      if (this.token === used) this.token = await this.ask(used ? problem.detail : "");
    }
  }

  /**
   * Follows server-sent events until `signal`, while the page is visible. Calls `heard(kind, data)` for each event,
   * `live(true)` when connected, and `live(false, milliseconds to the next try, reason)` when disconnected.
   */
  async follow(path, { heard, live, signal }) {
    let last = "";
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      await seen(signal); // browsers allow six connections to a service: a hidden tab frees its own
      let cut, spoken;
      let why = "";
      const limit = () => {
        cut = new AbortController();
        spoken = Date.now();
        document.addEventListener("visibilitychange", () => cut.abort(), { signal: cut.signal });
        return AbortSignal.any([signal, cut.signal]);
      };
      // By the wall clock: timers stop while a laptop sleeps, and its connections break.
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
        if (!(error instanceof ApiError || error.name === "AbortError")) console.error(error);
        else if (error instanceof ApiError && !(error instanceof Unreachable)) why = error.message;
      } finally {
        clearInterval(watch);
        cut.abort(); // close a half-read response
      }
      if (signal.aborted) return;
      live(false, pause, why);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}

/** Resolves when the page becomes visible or is closed. */
function seen(signal) {
  if (!document.hidden) return null;
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
    signal.addEventListener("abort", resolve, { once: true });
  });
}

/** Resolves or rejects as `promise`, a use of the network, but with `Unreachable` where a browser has a TypeError. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error instanceof TypeError ? new Unreachable() : error;
  }
}

/** Returns the error of a request with a message for operators; an error of this program as it is. */
function explained(error) {
  if (error.name === "TimeoutError") {
    return new ApiError(0, `The metrics service did not answer within ${REQUEST / 1000} s.`);
  }
  if (error instanceof SyntaxError) {
    return new ApiError(
      0,
      "The answer is not JSON: it does not come from the metrics service. Check the proxy in front of it.",
    );
  }
  return error;
}

const within = (milliseconds, signal) =>
  AbortSignal.any([AbortSignal.timeout(milliseconds), ...(signal ? [signal] : [])]);

/** Parses the server-sent events of a body: {event, id, data}. */
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
    const { done, value } = await reached(reader.read());
    if (done) return;
    const parts = (rest + value).split(/\r?\n/);
    rest = parts.pop();
    yield* parts;
  }
}
