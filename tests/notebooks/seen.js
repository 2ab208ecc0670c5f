(() => {
  const cells = [...document.querySelectorAll(".jp-Notebook .jp-Cell")];
  const outputs = [...document.querySelectorAll(".jp-Notebook .jp-OutputArea-output")];
  const images = outputs.flatMap(output => [...output.querySelectorAll("img")]);
  const kernel = document.querySelector(".jp-NotebookPanel .jp-KernelName")?.textContent ?? "";
  const idle = document.querySelector(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status=idle]") !== null;
  return {
    cells: cells.length,
    ready: kernel.startsWith("Python") && idle &&
           cells.every(cell => !cell.classList.contains("jp-mod-placeholder")) &&
           images.every(image => image.complete),
    unsaved: document.querySelectorAll(".lm-TabBar-tab.jp-mod-dirty").length,
    images: images.map(image => [image.naturalWidth, image.getBoundingClientRect().width,
                                 image.closest(".jp-OutputArea-output").getBoundingClientRect().width]),
    wide: outputs.filter(output => !output.querySelector("table") && output.scrollWidth > output.clientWidth + 1)
                 .map(output => output.textContent.slice(0, 200)),
    cut: [...document.querySelectorAll(".jp-Notebook .jp-CodeCell .jp-InputArea-editor .cm-scroller")]
         .filter(editor => editor.scrollWidth > editor.clientWidth + 1)
         .map(editor => [...editor.querySelectorAll(".cm-line")].map(line => line.textContent)
                        .reduce((a, b) => a.length >= b.length ? a : b)),
  };
})()
