"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const model = document.body.dataset.model;
  const isChat = document.body.dataset.chat === "true";
  const [messages, form, input, send, stop, reset] =
    ["messages", "form", "input", "send", "stop", "reset"].map(find);
  let conversation = [];
  let controller = null;

  // Append an article and return the element that shows its text.
  const show = (kind, title, prompt = "") => {
    const article = document.createElement("article");
    article.className = kind;
    const heading = document.createElement("h2");
    heading.textContent = title;
    const text = document.createElement("span");
    article.append(heading);
    if (prompt) {
      const start = document.createElement("span");
      start.className = "prompt";
      start.textContent = prompt;
      article.append(start);
    }
    article.append(text);
    messages.append(article);
    article.scrollIntoView({ block: "nearest" });
    return text;
  };

  const buildRequest = (text) => {
    const settings = {
      model,
      stream: true,
      temperature: Number(find("temperature").value),
      max_tokens: Number(find("max-tokens").value),
    };
    return isChat
      ? ["/v1/chat/completions", { ...settings, messages: conversation }]
      : ["/v1/completions", { ...settings, prompt: text }];
  };

  // Call `onText` with each part of the text of a stream of server-sent events.
  const readEvents = async (body, onText) => {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        for (const choice of chunk.choices) {
          onText((isChat ? choice.delta.content : choice.text) || "");
        }
      }
    }
  };

  const generate = async (text) => {
    const [path, request] = buildRequest(text);
    controller = new AbortController();
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const output = isChat ? show("assistant", model) : show("assistant", model, text);
    let answer = "";
    const finish = () => {
      if (isChat) conversation.push({ role: "assistant", content: answer });
    };
    try {
      await readEvents(response.body, (part) => {
        answer += part;
        output.textContent = answer;
        output.parentElement.scrollIntoView({ block: "nearest" });
      });
    } finally {
      finish();
    }
  };

  const submit = async () => {
    const text = input.value;
    if (controller || !text.trim()) return;
    input.value = "";
    if (isChat) {
      conversation.push({ role: "user", content: text });
      show("user", "you").textContent = text;
    }
    send.disabled = true;
    stop.disabled = false;
    try {
      await generate(text);
    } catch (error) {
      if (error.name !== "AbortError") show("error", "error").textContent = error.message;
    }
    controller = null;
    send.disabled = false;
    stop.disabled = true;
    input.focus();
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  stop.addEventListener("click", () => controller && controller.abort());
  reset.addEventListener("click", () => {
    if (controller) controller.abort();
    conversation = [];
    messages.replaceChildren();
    input.focus();
  });
})();
