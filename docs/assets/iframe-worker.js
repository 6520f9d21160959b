// Search without a server: a page that is opened as a file may start no Worker, so the worker's script runs in a hidden
// frame and is spoken to as a Worker is. The offline plugin leaves out its own, of another server, for this one's name.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.tell(this, data);
      this.loaded = new Promise((resolve) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        this.inside.document.documentElement.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.tell(this.inside, data));
    }
    tell(target, data) {
      const event = new MessageEvent("message", { data });
      target.dispatchEvent(event);
      if (target === this && this.onmessage) this.onmessage(event);
    }
    terminate() {}
  };
}
