// The dashboard file as Grafana's own code draws it, without Grafana's server: @grafana/scenes lays
// rows, panels, variables and queries out and applies the field options; @grafana/ui draws series
// and figures. What is in neither package stands here: the reading of the file into a scene, a data
// source that asks Prometheus's HTTP API, and the two plugins around the drawing.
//
// `?prometheus=URL&every=2s&minutes=N&theme=light` say what is asked, what it is scraped every, for how
// long back, and on what ground it is drawn.

import './boot';

import {
  createTheme,
  DataFrame,
  DataSourceApi,
  DataSourceInstanceSettings,
  displayNameOverrideProcessor,
  EventBusSrv,
  FieldType,
  getFieldDisplayValues,
  identityOverrideProcessor,
  LoadingState,
  numberOverrideProcessor,
  PanelData,
  PanelPlugin,
  PanelProps,
  rangeUtil,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import {
  config,
  setAppEvents,
  setDataSourceSrv,
  setPluginImportUtils,
  setRunRequest,
  setTemplateSrv,
} from '@grafana/runtime';
import {
  DataSourceVariable,
  EmbeddedScene,
  MultiValueVariable,
  QueryVariable,
  sceneGraph,
  SceneControlsSpacer,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneRefreshPicker,
  SceneTimePicker,
  SceneTimeRange,
  SceneVariableSet,
  VariableValueSelectors,
  VizPanel,
} from '@grafana/scenes';
import {
  BigValue,
  GlobalStyles,
  PortalContainer,
  ThemeContext,
  TimeSeries,
  VizRepeater,
} from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';
import { from, map, Observable, startWith } from 'rxjs';

import dashboard from '../../../docs/grafana/mlx-manager.json';

const asked = new URLSearchParams(location.search);
const prometheus = asked.get('prometheus')!;
const theme = createTheme({ colors: { mode: (asked.get('theme') as 'dark' | 'light') ?? 'dark' } });
config.theme2 = theme;
setAppEvents(new EventBusSrv());

// -- Prometheus ------------------------------------------------------------------------------

const SETTINGS = {
  id: 1,
  uid: 'prometheus',
  name: 'Prometheus',
  type: 'prometheus',
  access: 'proxy',
  isDefault: true,
  jsonData: { timeInterval: asked.get('every') ?? '2s' },
  meta: { id: 'prometheus', name: 'Prometheus', metrics: true, info: { logos: { small: '' } } },
} as unknown as DataSourceInstanceSettings;

async function api(path: string, parameters: Record<string, string>) {
  const answer = await fetch(`${prometheus}/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const told = await answer.json();
  if (told.status !== 'success') {
    throw new Error(`${told.error} (${JSON.stringify(parameters)})`);
  }
  return told.data;
}

const escaped = (value: string) => value.replace(/[\\^$.*+?()[\]{}|]/g, '\\\\$&');

/** As Grafana's data source writes values into an expression: several of them as alternatives. */
function pattern(value: unknown, variable: { multi?: boolean; includeAll?: boolean }): string {
  if (Array.isArray(value)) {
    return value.length === 1 ? escaped(value[0]) : `(${value.map(escaped).join('|')})`;
  }
  return variable.multi || variable.includeAll ? escaped(String(value)) : String(value);
}

function named(legend: string, labels: Record<string, string>): string {
  return legend.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
}

class Prometheus extends DataSourceApi {
  async query(request: any): Promise<any> {
    const scrape = rangeUtil.intervalToSeconds(SETTINGS.jsonData.timeInterval);
    const step = Math.max(rangeUtil.intervalToSeconds(request.interval), scrape);
    const rate = Math.max(step + scrape, 4 * scrape);
    const scene = request.scopedVars.__sceneObject.value.valueOf();
    const scoped = {
      ...request.scopedVars,
      __interval: { value: `${step}s` },
      __rate_interval: { value: `${rate}s` },
    };
    const answers = request.targets.map(async (target: any) => {
      const expression = sceneGraph.interpolate(scene, target.expr, scoped, pattern as any);
      const data = await api('query_range', {
        query: expression,
        start: String(request.range.from.unix()),
        end: String(request.range.to.unix()),
        step: String(step),
      });
      return data.result.map((series: any) => frame(target, series, step));
    });
    return { data: (await Promise.all(answers)).flat() };
  }

  async metricFindQuery(query: any) {
    const [, metric, label] = /^label_values\((.+),\s*(\w+)\)$/.exec(query.query)!;
    const values = await api(`label/${label}/values`, { 'match[]': metric });
    return values.map((text: string) => ({ text }));
  }

  async testDatasource() {
    return { status: 'success', message: '' };
  }
}

/** A step that is not there, or is no number, is a gap, as Grafana's panels have it. */
function filled(values: [number, string][], step: number): [number, number | null][] {
  const told = new Map(values.map(([at, value]) => [at, Number(value)]));
  const [first, last] = [values[0][0], values[values.length - 1][0]];
  return Array.from({ length: Math.round((last - first) / step) + 1 }, (_, i) => {
    const value = told.get(first + i * step);
    return [first + i * step, Number.isFinite(value) ? value! : null];
  });
}

function frame(target: any, series: any, step: number): DataFrame {
  const { __name__: name, ...labels } = series.metric;
  const values = filled(series.values, step);
  const legend = target.legendFormat ? named(target.legendFormat, labels) : undefined;
  return {
    refId: target.refId,
    name: legend,
    length: values.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: values.map(([at]) => at * 1000) },
      {
        name: name ?? 'Value',
        type: FieldType.number,
        labels,
        config: { displayNameFromDS: legend ?? JSON.stringify(labels) },
        values: values.map(([, value]) => value),
      },
    ],
  };
}

const source = new Prometheus(SETTINGS);
setDataSourceSrv({
  get: async () => source,
  getList: () => [SETTINGS],
  getInstanceSettings: () => SETTINGS,
  reload: () => undefined,
  registerRuntimeDataSource: () => undefined,
} as any);
setTemplateSrv({
  replace: (text: string, scoped: any, format: any) =>
    sceneGraph.interpolate(scoped.__sceneObject.value.valueOf(), text, scoped, format),
  getVariables: () => [],
  containsTemplate: () => false,
  updateTimeRange: () => undefined,
} as any);
setRunRequest((datasource, request): Observable<PanelData> => {
  const none = { series: [], timeRange: request.range, request };
  return from(datasource.query(request) as Promise<any>).pipe(
    map(({ data }) => ({ ...none, state: LoadingState.Done, series: data })),
    startWith({ ...none, state: LoadingState.Loading })
  );
});

// -- panels ----------------------------------------------------------------------------------

// What a field may be given by the file, standard and for the drawing of series. Grafana's server side
// of the page also registers editors for each, which nobody opens here.
const number = { process: numberOverrideProcessor };
const STANDARD: Record<string, object> = {
  unit: { process: unitOverrideProcessor },
  min: number,
  max: number,
  decimals: number,
  displayName: { process: displayNameOverrideProcessor },
  noValue: { process: stringOverrideProcessor },
  thresholds: {
    process: thresholdsOverrideProcessor,
    defaultValue: { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }] },
  },
  mappings: { process: valueMappingsOverrideProcessor },
  color: { defaultValue: undefined },
  links: {},
};
const CUSTOM = [
  ...['drawStyle', 'lineInterpolation', 'lineWidth', 'fillOpacity', 'gradientMode', 'lineStyle'],
  ...['spanNulls', 'insertNulls', 'showPoints', 'pointSize', 'barAlignment', 'barWidthFactor'],
  ...['fillBelowTo', 'transform', 'thresholdsStyle', 'stacking', 'hideFrom', 'scaleDistribution'],
  ...['axisPlacement', 'axisLabel', 'axisSoftMin', 'axisSoftMax', 'axisColorMode'],
];

function property(path: string, own: object = {}): any {
  return {
    id: path,
    path,
    name: path,
    editor: () => null,
    override: () => null,
    process: identityOverrideProcessor,
    shouldApply: () => true,
    settings: {},
    ...own,
  };
}

standardFieldConfigEditorRegistry.setInit(() =>
  Object.entries(STANDARD).map(([path, own]) => property(path, own))
);
standardEditorsRegistry.setInit(() => []);

function SeriesPanel(props: PanelProps<any>) {
  const { data, options, width, height, timeRange, timeZone } = props;
  if (data.series.length === 0) {
    return <div className="empty">No data</div>;
  }
  return (
    <TimeSeries
      frames={data.series}
      structureRev={data.structureRev}
      timeRange={timeRange}
      timeZone={timeZone}
      width={width}
      height={height}
      legend={options.legend}
      options={options}
    />
  );
}

const timeseries = new PanelPlugin<any, any>(SeriesPanel).useFieldConfig({
  useCustomConfig: (builder) => CUSTOM.forEach((path) => builder.addCustomEditor(property(path))),
});

function StatPanel(props: PanelProps<any>) {
  const { data, options, fieldConfig, width, height, replaceVariables, timeZone } = props;
  if (data.series.length === 0) {
    return <div className="empty">No data</div>;
  }
  const values = () =>
    getFieldDisplayValues({
      fieldConfig,
      reduceOptions: options.reduceOptions,
      replaceVariables,
      theme,
      data: data.series,
      sparkline: options.graphMode !== 'none',
      timeZone,
    });
  return (
    <VizRepeater
      getValues={values}
      source={data}
      width={width}
      height={height}
      orientation={options.orientation}
      itemSpacing={3}
      renderCounter={props.renderCounter}
      autoGrid
      renderValue={({ value, width, height, count }: any) => (
        <BigValue
          value={value.display}
          count={count}
          sparkline={value.sparkline}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          width={width}
          height={height}
          theme={theme}
        />
      )}
    />
  );
}

const stat = new PanelPlugin<any, any>(StatPanel).useFieldConfig();

const PLUGINS: Record<string, PanelPlugin<any, any>> = { timeseries, stat };
for (const [id, plugin] of Object.entries(PLUGINS)) {
  plugin.meta = { id, name: id, type: 'panel', info: {}, module: '', baseUrl: '' } as any;
}
setPluginImportUtils({
  importPanelPlugin: async (id) => {
    if (!(id in PLUGINS)) {
      throw new Error(`the file has a panel of type ${id}, which this page can't draw`);
    }
    return PLUGINS[id];
  },
  getPanelPluginFromCache: (id) => PLUGINS[id],
});

// -- the file --------------------------------------------------------------------------------

function variable(model: any) {
  const shared = { name: model.name, label: model.label, hide: model.hide };
  switch (model.type) {
    case 'datasource':
      return new DataSourceVariable({ ...shared, pluginId: model.query, value: 'prometheus', text: 'Prometheus' });
    case 'query':
      return new QueryVariable({
        ...shared,
        datasource: model.datasource,
        query: model.query,
        refresh: model.refresh,
        regex: model.regex,
        sort: model.sort,
        includeAll: model.includeAll,
        allValue: model.allValue,
        isMulti: model.multi,
        value: model.current.value,
        text: model.current.text,
      });
  }
  throw new Error(`variable ${model.name} is of type ${model.type}, which this page can't show`);
}

function item(panel: any) {
  const { x, y, w, h } = panel.gridPos;
  const queries = new SceneQueryRunner({
    datasource: panel.datasource,
    queries: panel.targets,
    maxDataPoints: panel.maxDataPoints,
    minInterval: panel.interval,
  });
  const body = new VizPanel({
    key: `panel-${panel.id}`,
    title: panel.title,
    description: panel.description,
    pluginId: panel.type,
    options: panel.options,
    fieldConfig: panel.fieldConfig,
    $data: panel.transformations?.length
      ? new SceneDataTransformer({ $data: queries, transformations: panel.transformations })
      : queries,
  });
  return new SceneGridItem({ x, y, width: w, height: h, body });
}

function grid(panels: any[]) {
  const children: any[] = [];
  let row: SceneGridRow | undefined;
  for (const panel of panels) {
    if (panel.type === 'row') {
      const { title, collapsed, gridPos } = panel;
      const inside = panel.panels.map(item);
      row = new SceneGridRow({ title, isCollapsed: collapsed, y: gridPos.y, children: inside });
      children.push(row);
    } else if (row) {
      row.setState({ children: [...row.state.children, item(panel)] });
    } else {
      children.push(item(panel));
    }
  }
  return children;
}

const body = new SceneGridLayout({ children: grid(dashboard.panels), isLazy: false });
const scene = new EmbeddedScene({
  $timeRange: new SceneTimeRange({
    from: asked.has('minutes') ? `now-${asked.get('minutes')}m` : dashboard.time.from,
    to: dashboard.time.to,
  }),
  $variables: new SceneVariableSet({ variables: dashboard.templating.list.map(variable) }),
  controls: [
    new VariableValueSelectors({}),
    new SceneControlsSpacer(),
    new SceneTimePicker({ isOnCanvas: true }),
    new SceneRefreshPicker({ isOnCanvas: true, refresh: dashboard.refresh }),
  ],
  body,
});

createRoot(document.getElementById('root')!).render(
  <BrowserRouter>
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <scene.Component model={scene} />
      <PortalContainer />
    </ThemeContext.Provider>
  </BrowserRouter>
);

/** How many panels have no answer to their queries yet, those in closed rows among them. */
function waiting(): number {
  const runners = sceneGraph.findAllObjects(scene, (found) => found instanceof SceneQueryRunner);
  const states = runners.map((runner) => (runner as SceneQueryRunner).state.data?.state);
  return states.filter((state) => state !== LoadingState.Done).length;
}

/** Opens a row that the file has closed; false if there is none left. */
function open(): boolean {
  const closed = body.state.children.find(
    (child) => child instanceof SceneGridRow && child.state.isCollapsed
  );
  if (closed) {
    body.toggleRow(closed as SceneGridRow);
  }
  return closed !== undefined;
}

/** Chooses values of a variable, as a person does. */
function choose(name: string, values: string[]): void {
  const found = sceneGraph.lookupVariable(name, scene) as MultiValueVariable;
  found.changeValueTo(values, values, true);
}

Object.assign(window, { scene, waiting, open, choose });
