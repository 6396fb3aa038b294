// What Grafana's server writes into its page, and its packages read when they are loaded.
const user = { weekStart: 'monday', timezone: 'browser', locale: 'en-GB', permissions: {} };
Object.assign(window, {
  grafanaBootData: { settings: { featureToggles: {} }, user, navTree: [] },
  __grafana_public_path__: '/public/',
});
