// Browsers refuse web workers on pages opened with file://. This class runs the worker's script in a hidden
// iframe instead, with the same interface as far as the search uses it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.ready = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.src = "about:blank";
        document.body.appendChild(frame);
        const inner = frame.contentWindow;
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inner.importScripts = (...urls) =>
          urls.reduce((before, next) => before.then(() => load(inner, next)), Promise.resolve());
        load(inner, String(url)).then(() => resolve(inner));
      });
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {}
  };

  function load(target, url) {
    return new Promise((resolve, reject) => {
      const script = target.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      target.document.head.appendChild(script);
    });
  }
}
