// Search from file://, where browsers start no worker: run the worker's script in a hidden frame instead.
// The site generator would load a script for this from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (message) => {
        const event = new MessageEvent("message", { data: structuredClone(message) });
        setTimeout(() => {
          this.dispatchEvent(event);
          this.onmessage?.(event);
        });
      };
      this.loaded = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = resolve;
        script.onerror = reject;
        inner.document.body.append(script);
      });
      this.loaded.catch((event) => this.onerror?.(event));
    }

    postMessage(message) {
      const data = structuredClone(message); // a worker may change what it received
      const inner = this.frame.contentWindow;
      this.loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
