// Browsers start no worker on a page that was opened from a file; a hidden frame does its work there, so that the
// site's search needs no server.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const load = (source) => new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      Object.assign(script, { src: source, onload: resolve, onerror: reject });
      inside.document.body.appendChild(script);
    });
    inside.importScripts = (...sources) =>
      sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    this.ready = load(url);
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
