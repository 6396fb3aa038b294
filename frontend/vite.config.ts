import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: '../backend/mlx_manager/web',
    emptyOutDir: true,
    target: 'es2022',
    // The texts of the licences of all that is bundled, beside it.
    license: { fileName: 'licences.md' },
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
  experimental: {
    // The page is served at `/` and at `/ui`, behind any prefix: its files are in the folder `ui`.
    renderBuiltUrl: (name, { hostType }) =>
      hostType === 'html' ? `./ui/${name}` : { relative: true },
  },
  server: { proxy: { '/v1': 'http://127.0.0.1:8000', '/api': 'http://127.0.0.1:8000' } },
});
