import {Charts, numbers} from "./charts.js";
import {build, parse} from "./markdown.js";
import {Settings} from "./settings.js";
import * as store from "./store.js";

const $ = id => document.getElementById(id);
const MOST_PICTURE_BYTES = 20 * 2 ** 20;  // as the server takes
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const EXAMPLES = ["Explain in three sentences why the sea is salty.",
  "Write a Python function that merges two sorted lists.",
  "Give me a table of the four largest planets and their moons."];
const BEGINNINGS = ["Once upon a time", "def fibonacci(n):", "The for statement"];

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(text, act, properties = {}) {
  const made = make("button", {type: "button", ...properties}, text);
  made.addEventListener("click", () => act(made));
  return made;
}

// The server

class ServerError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    Object.assign(this, {status, param});
  }
}

async function reach(path, options) {
  const headers = {"content-type": "application/json"};
  if (settings.key) headers.authorization = "Bearer " + settings.key;
  const answer = await fetch(path, {headers, ...options}).catch(error => {
    throw error.name === "AbortError" ? error : new ServerError("The server does not answer.");
  });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    throw new ServerError("This server wants a key: give it in the settings.", 401, "key");
  }
  const said = (await answer.json().catch(() => null))?.error;
  const words = said?.message || `The server answers ${answer.status} to ${path}.`;
  throw new ServerError(words, answer.status, said?.param);
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new ServerError("The answer breaks off: the server has ended it.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

// Models

let models = [];
let facts = null;  // what /metrics says of the chosen one
const canChat = new Map();  // by name: whether it has a chat template
const chosen = () => models.find(one => one.id === $("models").value) || null;
const sees = () => chosen()?.architecture?.input_modalities?.includes("image") || false;

async function findModels() {
  models = (await (await reach("models")).json()).data;
  const shown = models.map(one => {
    const isLoaded = !one.status || one.status.value === "loaded";
    return [one.id, one.id + (one.parent ? ` (on ${one.parent})` : "")
      + (isLoaded ? "" : `, ${one.status.value}`)];
  });
  const text = JSON.stringify(shown), old = $("models").value;
  if ($("models").dataset.shown !== text) {
    $("models").dataset.shown = text;
    $("models").replaceChildren(...shown.map(([value, label]) => make("option", {value}, label)));
    if (models.some(one => one.id === old)) $("models").value = old;
  }
  await showModel();
}

async function learn(model) {  // asks for a model's template, which loads it
  if (canChat.has(model.id)) return;
  const info = await (await reach("tokenizer_info?model=" + encodeURIComponent(model.id))).json();
  canChat.set(model.id, info.chat_template !== null);
}

async function showModel() {
  const model = chosen();
  if (model && (!model.status || model.status.value === "loaded")) await learn(model);
  if (model !== chosen()) return;  // another was chosen meanwhile
  const chats = canChat.get(model?.id) ?? true;
  $("add-picture").hidden = !sees();
  $("text").placeholder = chats ? "Ask something" : "The model continues your text";
  const examples = chats ? EXAMPLES : BEGINNINGS;
  if ($("examples").firstChild?.textContent !== examples[0]) {
    $("examples").replaceChildren(...examples.map(text => button(text, () => send(text))));
  }
  document.title = model ? `${model.id} · moe-runtime` : "moe-runtime";
  showFacts();
}

function bytes(number) {
  const unit = number >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(number / unit[0]).toPrecision(3).replace(/\.?0+$/, "")} ${unit[1]}`;
}

function showFacts() {
  const model = chosen();
  const rows = model ? [["Model", model.parent ? `${model.parent} with ${model.id}` : model.id]] : [];
  if (facts?.["moe:expert_bytes"]) {
    const all = facts["moe:expert_bytes"];
    const kept = Math.min(facts["moe:expert_slots"] * facts["moe:expert_slot_bytes"], all);
    rows.push(["Experts in memory", `${bytes(kept)} of ${bytes(all)} (${Math.round(100 * kept / all)}\u00a0%)`]);
    rows.push(["Memory budget", bytes(facts["moe:memory_budget_bytes"])]);
  }
  if (model?.max_model_len) rows.push(["Conversation", `up to ${model.max_model_len.toLocaleString()} tokens`]);
  const text = JSON.stringify(rows);
  if ($("facts").dataset.shown === text) return;
  $("facts").dataset.shown = text;
  $("facts").replaceChildren(...rows.flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, value)]));
}

// A conversation: messages as the API has them, each with `note`, what the page says below it

let talk = fresh();
let running = null;  // what stops the answer that is being made
let pending = [];  // data URLs of pictures of the next message

function fresh() {
  return {id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changed: 0,
    system: "", messages: []};
}

const plain = messages => messages.map(({note, ...message}) => message);
const textOf = message => typeof message.content === "string" ? message.content
  : (message.content || []).filter(part => part.type === "text").map(part => part.text).join("\n");
const picturesOf = message => Array.isArray(message.content)
  ? message.content.filter(part => part.type === "image_url").map(part => part.image_url.url) : [];

async function keep(one = talk) {
  one.changed = Date.now();
  try {
    await store.put(one);
    $("list-state").textContent = await store.isKept() ? "" : "This browser keeps no conversations.";
  } catch (error) {
    $("list-state").textContent = `This browser cannot keep the conversation: ${error.message}`;
  }
  await showList();
}

async function showList() {
  const found = await store.all();
  $("export-all").hidden = !found.length;
  $("conversations").replaceChildren(...found.map(listed));
}

function listed(one) {
  const acts = make("div", {className: "acts", hidden: true},
    button("Rename", () => rename(one, row)),
    button("Export", () => download([one])),
    button("Delete", async made => {
      if (made.textContent === "Delete") {
        made.textContent = "Really delete";
        return;
      }
      await store.remove(one.id);
      if (one.id === talk.id) begin();
      await showList();
      $("new").focus();
    }));
  const more = button("⋯", () => {
    acts.hidden = !acts.hidden;
    more.setAttribute("aria-expanded", String(!acts.hidden));
  });
  more.className = "quiet";
  more.setAttribute("aria-label", `More for ${one.title}`);
  more.setAttribute("aria-expanded", "false");
  const row = make("li", {}, button(one.title, () => begin(one), {className: "title"}), more, acts);
  if (one.id === talk.id) row.setAttribute("aria-current", "true");
  return row;
}

function rename(one, row) {
  const field = make("input", {value: one.title});
  field.setAttribute("aria-label", "Name of the conversation");
  let isOver = false;
  const end = async isWanted => {
    if (isOver) return;
    isOver = true;
    if (isWanted && field.value.trim()) {
      const title = field.value.trim();
      if (one.id === talk.id) talk.title = title;
      await store.put({...one, title});
    }
    await showList();
  };
  field.addEventListener("keydown", event => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") {
      event.preventDefault();
      end(false);
    }
  });
  field.addEventListener("blur", () => end(true));
  row.firstChild.replaceWith(field);
  field.select();
}

function download(conversations) {  // lines that `moe-runtime generate` takes
  const lines = conversations.map(one => {
    const system = one.system ? [{role: "system", content: one.system}] : [];
    return JSON.stringify({messages: [...system, ...plain(one.messages)]}) + "\n";
  });
  const url = URL.createObjectURL(new Blob(lines, {type: "application/jsonl"}));
  make("a", {href: url, download: conversations.length === 1 ? "conversation.jsonl"
    : "conversations.jsonl"}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function begin(one = null) {
  running?.abort();
  running = null;
  setRunning(false);
  talk = one ? structuredClone(one) : fresh();
  showMessages();
  showList();
  if ($("list").matches(":popover-open")) $("list").hidePopover();
  showView("chat");
  $("talk").scrollTop = $("talk").scrollHeight;
  $("text").focus();
}

// Messages

function codeBlock(language, text) {
  const code = make("pre", {tabIndex: 0}, make("code", {}, text));
  code.setAttribute("aria-label", `Code${language && " in " + language}`);
  return make("div", {className: "code"},
    make("div", {}, make("span", {}, language || "code"), copying(() => text)), code);
}

function copying(text) {
  return button("Copy", async made => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
}

async function copy(text) {
  const isDone = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  if (isDone) return;
  const field = make("textarea", {value: text, className: "hidden"});  // without https
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

function showMarkdown(box, text) {  // only blocks that have changed are made anew
  const blocks = parse(text), old = box.blocks || [];
  box.blocks = blocks.map(block => JSON.stringify(block));
  let at = 0;
  while (at < old.length && old[at] === box.blocks[at]) at += 1;
  while (box.childNodes.length > at) box.lastChild.remove();
  box.append(build(blocks.slice(at), codeBlock));
}

function folded(kind, title, text) {
  return make("details", {className: kind}, make("summary", {}, title), make("pre", {}, text));
}

function show(message, at) {
  const box = make("article", {className: `message ${message.role}`});
  const foot = make("footer");
  box.append(make("h2", {className: "hidden"}, message.role === "user" ? "You" : "Answer"));
  if (message.role === "tool") {
    box.append(folded("call", "Result of a tool", textOf(message)));
    return box;
  }
  if (message.role === "user") {
    for (const src of picturesOf(message)) {
      box.append(make("img", {src, className: "picture", alt: "Picture of this message"}));
    }
    box.append(make("div", {className: "text"}, textOf(message)), foot);
    foot.append(button("Edit", () => edit(box, at), {className: "quiet change"}));
  } else {
    fill(box, message);
    box.append(foot);
    const isLast = at === talk.messages.length - 1;
    if (isLast) foot.append(button("Retry", () => retry(at), {className: "quiet change"}));
  }
  const copier = copying(() => textOf(message));
  copier.className = "quiet";
  if (textOf(message)) foot.append(copier);
  if (message.note) foot.append(make("span", {className: "note"}, message.note));
  if (message.tool_calls && at === talk.messages.length - 1) box.append(resultForm(message));
  return box;
}

function fill(box, message) {  // what of an answer is there, without beginning anew
  const parts = box.parts ??= {};
  const part = (name, made) => {
    if (!parts[name]) box.append(parts[name] = made());
    return parts[name];
  };
  if (message.reasoning_content) {
    const thought = part("thought", () => folded("thought", "Thinking", ""));
    thought.lastChild.textContent = message.reasoning_content;
  }
  if (message.content) {
    showMarkdown(part("said", () => make("div", {className: "said"})), message.content);
  }
  for (const [at, call] of (message.tool_calls || []).entries()) {
    const shown = part(`call ${at}`, () => folded("call", "", ""));
    shown.firstChild.textContent = `Call of ${call.function.name}`;
    shown.lastChild.textContent = call.function.arguments;
  }
}

function resultForm(message) {
  const fields = message.tool_calls.map(call =>
    [call, make("textarea", {rows: 2, id: "result-" + call.id, required: true})]);
  const form = make("form", {}, ...fields.flatMap(([call, field]) =>
    [make("label", {htmlFor: field.id}, `Result of ${call.function.name}`), field]),
    make("div", {className: "row"}, make("button", {}, "Send results")));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (running) return;
    const results = fields.map(([call, field]) =>
      ({role: "tool", tool_call_id: call.id, content: field.value}));
    answer([...talk.messages, ...results]);
  });
  return form;
}

function showMessages(...more) {
  const isBegun = talk.messages.length + more.length > 0;
  $("start").hidden = isBegun;
  $("title").hidden = !isBegun;
  $("title").textContent = talk.title;
  $("messages").replaceChildren(...talk.messages.map(show), ...more);
}

function edit(box, at) {
  const message = talk.messages[at];
  const field = make("textarea", {value: textOf(message), rows: 3});
  field.setAttribute("aria-label", "Message, edited");
  const form = make("form", {}, field, make("div", {className: "row"},
    button("Cancel", () => showMessages()), make("button", {}, "Send")));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    answer([...talk.messages.slice(0, at), userMessage(field.value, picturesOf(message))]);
  });
  field.addEventListener("keydown", event => {
    if (event.key === "Escape") showMessages();
    if (isSending(event)) form.requestSubmit();
  });
  box.replaceChildren(form);
  field.focus();
}

function retry(at) {
  if (!running) answer(talk.messages.slice(0, at));
}

// Answers

function userMessage(text, pictures) {
  const parts = pictures.map(url => ({type: "image_url", image_url: {url}}));
  return {role: "user", content: parts.length ? [...parts, {type: "text", text}] : text};
}

function send(text) {
  if (running || !text.trim()) return;
  const message = userMessage(text, pending);
  $("text").value = "";
  setPending([]);
  answer([...talk.messages, message], message);
}

function addDelta(message, delta) {
  for (const name of ["content", "reasoning_content"]) {
    if (delta[name]) message[name] = (message[name] || "") + delta[name];
  }
  for (const part of delta.tool_calls || []) {
    message.tool_calls ??= [];
    const call = message.tool_calls[part.index ?? message.tool_calls.length] ??=
      {id: part.id, type: "function", function: {name: "", arguments: ""}};
    call.function.name += part.function?.name || "";
    call.function.arguments += part.function?.arguments || "";
  }
}

async function answer(messages, typed = null) {  // answers the last of these, which replace the talk's
  const asked = settings.read();
  if (!asked) {
    if (typed) restore(typed);
    return;
  }
  const own = talk, before = talk.messages, oldTitle = talk.title, made = {role: "assistant", content: ""};
  const {system, ...options} = asked;
  Object.assign(own, {messages, system});
  const titleOf = ([first]) => first ? textOf(first).trim().split("\n")[0].slice(0, 60) || "Picture" : "";
  if (own.title === titleOf(before)) own.title = titleOf(messages);  // it was not renamed
  const control = running = new AbortController();
  const box = make("article", {className: "message assistant waiting"});
  showMessages(box);
  setRunning(true);
  $("talk").scrollTop = $("talk").scrollHeight;
  keep(own);
  const begun = performance.now();
  let first = null, usage = null, reason = null, problem = null, frame = 0, saved = begun;
  const voice = new Voice();
  const update = () => {
    frame = 0;
    const view = $("talk"), follows = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
    fill(box, made);
    if (follows) view.scrollTop = view.scrollHeight;  // who has scrolled back reads on undisturbed
  };
  try {
    if (!models.length) await findModels();
    await learn(chosen());
    const chats = canChat.get(chosen().id);
    const head = system ? [{role: "system", content: system}] : [];
    Object.assign(options, {model: chosen().id, stream: true, stream_options: {include_usage: true}},
      chats ? {messages: [...head, ...plain(messages)]} : {prompt: textOf(messages.at(-1))});
    if (!chats) delete options.tools;
    const response = await reach(chats ? "v1/chat/completions" : "v1/completions",
      {method: "POST", body: JSON.stringify(options), signal: control.signal});
    for await (const chunk of eventsOf(response)) {
      if (chunk.error) throw new ServerError(chunk.error.message);
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason || reason;
      const delta = choice.delta || {content: choice.text};
      addDelta(made, delta);
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        first ??= performance.now();
        box.classList.remove("waiting");
        frame ||= requestAnimationFrame(update);
      }
      voice.add(delta.content || "");
      if (performance.now() - saved > 3000) {  // what is there outlives the page
        saved = performance.now();
        store.put({...own, messages: [...messages, made]}).catch(() => null);
      }
    }
  } catch (error) {
    problem = error;
  }
  cancelAnimationFrame(frame);
  voice.end();
  const isStopped = problem?.name === "AbortError";
  const isEmpty = !made.content && !made.tool_calls;
  made.note = isStopped ? "Stopped." : noteOf(reason, usage, first - begun, performance.now() - first);
  if (isEmpty) {
    Object.assign(own, {messages: before, title: oldTitle});
  } else {
    own.messages = [...messages, made];
    if (before.length - messages.length > 1) {  // more than an answer goes: it stays beside
      await keep({...own, id: fresh().id, title: `${oldTitle} (before)`, messages: before});
    }
  }
  if (running === control) running = null;
  if (own.messages.length) await keep(own);
  else await store.remove(own.id).then(showList, () => null);
  if (own !== talk) return;
  setRunning(false);
  const follows = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
  const wasFocused = document.activeElement === document.body;
  showMessages(...notices(problem, isStopped, isEmpty));
  if (follows) $("talk").scrollTop = $("talk").scrollHeight;
  if (wasFocused) $("text").focus();
  if (isEmpty && typed) restore(typed);
  if (problem?.param) settings.blame(problem.param, problem.message);
}

function notices(problem, isStopped, isEmpty) {
  if (problem && !isStopped) {
    const box = make("p", {className: "message error"}, problem.message);
    box.setAttribute("role", "alert");
    return [box];
  }
  if (!isEmpty) return [];
  return [make("p", {className: "message note"}, isStopped ? "Stopped." : "The answer is empty.")];
}

function noteOf(reason, usage, waitedMs, wroteMs) {
  const words = [];
  if (usage) {
    const number = usage.completion_tokens;
    words.push(`${number} tokens`);
    if (number > 1 && wroteMs > 0) words.push(`${(1000 * (number - 1) / wroteMs).toFixed(1)} tokens/s`);
    words.push(`first after ${(waitedMs / 1000).toFixed(1)} s`);
  }
  if (reason === "length") words.push("cut off: the answer has as many tokens as it may have");
  return words.join(" · ");
}

function restore(message) {  // to be asked again
  if ($("text").value || pending.length) return;
  $("text").value = textOf(message);
  setPending(picturesOf(message));
}

function setRunning(isRunning) {
  $("send").textContent = isRunning ? "Stop" : "Send";
  document.body.classList.toggle("running", isRunning);
  $("messages").setAttribute("aria-busy", String(isRunning));
}

class Voice {  // reads an answer to those who do not see it, a sentence at a time
  constructor() {
    $("spoken").replaceChildren();
    this.rest = "";
  }

  add(text) {
    this.rest += text;
    const end = Math.max(...[". ", "! ", "? ", ": ", "\n"].map(mark => this.rest.lastIndexOf(mark)));
    if (end < 0) return;
    this.say(this.rest.slice(0, end + 1));
    this.rest = this.rest.slice(end + 1);
  }

  end() {
    this.say(this.rest);
    this.rest = "";
  }

  say(text) {
    if (text.trim()) $("spoken").append(make("p", {}, text.trim()));
  }
}

// What is typed, pasted, dropped

function setPending(urls) {
  pending = urls;
  if (!isDown) say("");
  $("pictures").hidden = !urls.length;
  $("pictures").replaceChildren(...urls.map((src, at) => {
    const remove = button("×", () => setPending(pending.filter((_, index) => index !== at)));
    remove.setAttribute("aria-label", `Remove picture ${at + 1}`);
    return make("li", {}, make("img", {src, alt: `Picture ${at + 1}`}), remove);
  }));
}

async function addFiles(files) {
  const found = [...files];
  if (!found.length) return;
  if (!sees()) return say("This model takes no pictures.");
  for (const file of found) {
    if (!PICTURES.includes(file.type)) {
      say(`${file.name}: expected a PNG, JPEG, WebP or GIF picture.`);
    } else if (file.size > MOST_PICTURE_BYTES) {
      say(`${file.name}: has ${bytes(file.size)}, and a picture may have 20 MiB.`);
    } else {
      const url = await new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
      }).catch(() => say(`${file.name}: cannot be read.`));
      if (url) setPending([...pending, url]);
    }
  }
}

function isSending(event) {  // keys of a screen begin a new line: there is a button beside
  return event.key === "Enter" && !event.shiftKey && !event.isComposing
    && !matchMedia("(pointer: coarse)").matches;
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (running) running.abort();
  else send($("text").value);
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
  if (!isSending(event)) return;
  event.preventDefault();
  if (!running) $("ask").requestSubmit();
});
$("text").addEventListener("paste", event => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  addFiles(event.clipboardData.files);
});
$("add-picture").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await addFiles($("files").files);
  $("files").value = "";
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, event => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("ask").classList.toggle("over", kind === "dragover" && sees());
    if (kind === "drop") addFiles(event.dataTransfer.files);
  });
}
$("new").addEventListener("click", () => begin());
$("export-all").addEventListener("click", async () => download(await store.all()));
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("models").addEventListener("change", () => {
  charts.begin();
  showModel().catch(error => say(error.message));
});
$("models").addEventListener("focus", () => findModels().catch(error => say(error.message)));

// Views

const TABS = ["chat", "charts"];

function showView(name) {
  for (const one of TABS) {
    const isShown = one === name;
    $(one).hidden = !isShown;
    $(`tab-${one}`).setAttribute("aria-selected", String(isShown));
    $(`tab-${one}`).tabIndex = isShown ? 0 : -1;
  }
  if (name === "charts") charts.draw();
}
for (const name of TABS) {
  $(`tab-${name}`).addEventListener("click", () => showView(name));
  $(`tab-${name}`).addEventListener("keydown", event => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = TABS[1 - TABS.indexOf(name)];
    showView(other);
    $(`tab-${other}`).focus();
  });
}

function say(text) {  // of the server; a reader is told of changes alone
  if ($("state").textContent !== text) $("state").textContent = text;
}

let isDown = true, looks = 0;
async function watch() {
  try {
    if (!document.hidden) {
      if (!models.length || looks % 5 === 0) await findModels();  // some come and go
      looks += 1;
      const model = chosen();
      const text = await (await reach("metrics")).text();
      facts = numbers(text, model.parent || model.id);
      showFacts();
      const [rate, hits] = charts.take(facts, performance.now() / 1000);
      $("gauge-rate").textContent = rate;
      $("gauge-hits").textContent = hits;
      if (!$("charts").hidden) charts.draw();
      if (isDown) say("");
      isDown = false;
    }
  } catch (error) {
    charts.begin();
    isDown = true;
    say(error.message);
  }
  setTimeout(watch, 1000);
}

const settings = new Settings(() => { models = []; });
const charts = new Charts($("charts"));
showModel();
showList();
watch();
