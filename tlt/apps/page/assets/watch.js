"use strict";
(() => {
  // ── a run that is watched ──
  const stamp = document.documentElement.dataset.watch;
  if (stamp !== undefined) {
    setInterval(async () => {
      try {
        const answer = await fetch("/stamp");
        if (answer.ok && (await answer.text()) !== stamp) location.reload();
      } catch { /* the server has gone: the page stays as it is */ }
    }, 3000);
  }
})();
