import { defineConfig } from "vite";

// Fixed names, because the router serves a fixed list of files (src/warmroute/app/live_page.py).
export default defineConfig({
  base: "/page/",
  build: {
    outDir: "../src/warmroute/app/page",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    assetsInlineLimit: 0,
    modulePreload: false,
    rollupOptions: {
      output: { entryFileNames: "app.js", chunkFileNames: "app-[name].js", assetFileNames: "app[extname]" },
    },
  },
});
