"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let explained = "";
let running = null;

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function asked(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

// Texts of models are put in as texts, never as markup.
function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function show(role, text) {
  const made = $("messages").appendChild(element("div", text, `message ${role}`));
  made.scrollIntoView({ block: "nearest" });
  return made;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const shown = show("assistant", "");
  const began = performance.now();
  let first = 0;
  let count = 0;
  running = new AbortController();
  busy(true);
  try {
    const answer = await asked("v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({
        model: $("models").value,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number($("temperature").value),
        max_tokens: Number($("tokens").value),
      }),
    });
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta?.content;
      if (delta) {
        first = first || performance.now();
        shown.textContent += delta;
      }
      count = event.usage?.completion_tokens ?? count;
    }
    const rate = count > 1 ? (1000 * (count - 1)) / (performance.now() - first) : 0;
    $("figures").textContent =
      `${count} tokens, first after ${Math.round(first - began)} ms, then ${rate.toFixed(1)} tokens/s`;
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (shown.textContent) messages.push({ role: "assistant", content: shown.textContent });
    else messages.pop();
    running = null;
    busy(false);
    // The first message can load a model, whose kernels are known only then.
    if (explained !== $("models").value) explain();
  }
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  document.body.dataset.busy = is;
}

async function list() {
  const { data } = await (await asked("v1/models")).json();
  // Encoders cannot chat. The capabilities of a model are unknown until it is loaded.
  const chatting = data.filter((entry) => entry.capabilities?.includes("completion") ?? true);
  const names = [...$("models").options].map((option) => option.value);
  if (names.join() !== chatting.map((entry) => entry.id).join())
    $("models").replaceChildren(...chatting.map((entry) => element("option", entry.id)));
  return chatting.find((entry) => entry.id === $("models").value);
}

async function explain() {
  $("notes").replaceChildren();
  $("choices").replaceChildren();
  $("device").textContent = "";
  try {
    const entry = await list();
    if (!entry) throw new Error("The server has no model that can chat");
    const loaded = entry.max_model_len !== null;
    $("model").textContent = loaded ? `${entry.max_model_len} tokens of context` : entry.status.value;
    if (!loaded) return;
    const told = await (await asked(`explanation?model=${encodeURIComponent(entry.id)}`)).json();
    explained = entry.id;
    const { name, platform, torch_device } = told.device;
    $("device").textContent = `${name} (${platform}, ${torch_device})`;
    $("notes").replaceChildren(...told.notes.map((note) => element("li", note)));
    $("choices").replaceChildren(...told.choices.map(row));
    document.body.dataset.explained = "true";
  } catch (error) {
    $("device").textContent = error.message;
  }
}

function row(choice) {
  const made = document.createElement("tr");
  const dims = Object.entries(choice.dims).map(([name, value]) => `${name}=${value}`);
  const request = [choice.name, choice.dtype, ...dims].filter(Boolean).join(" ");
  const chosen = `${choice.chosen} (${choice.provider})`;
  const why = document.createElement("td");
  why.textContent = choice.why;
  if (choice.refused.length) {
    const details = why.appendChild(document.createElement("details"));
    details.append(element("summary", `${choice.refused.length} others`));
    for (const one of choice.refused)
      details.append(element("div", `${one.candidate} (${one.provider}): ${one.reason}`));
  }
  const places = choice.places.filter(Boolean);
  const many = places.length > 1 ? `${places[0]} and ${places.length - 1} more` : places.join();
  made.append(element("td", choice.kind), element("td", request), element("td", chosen), why);
  made.append(element("td", many));
  return made;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !running) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("messages").replaceChildren();
});
$("key").addEventListener("change", explain);
$("models").addEventListener("change", explain);
explain();
