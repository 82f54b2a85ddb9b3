// Does what VS Code's notebook page does for a saved widget: there is a state and no kernel.
import {activate} from './manager.js';

// VS Code brings an AMD loader; the manager asks it for nothing but its own three modules.
const known = {};
window.define = (name, make) => { known[name] = make(); };
window.requirejs = window.require = (names, got, failed) => {
  if (names[0] in known) got(known[names[0]]);
  else failed(new Error(`not bundled: ${names[0]}`));
};
activate();
window.vscIPyWidgets8.load();

const state = JSON.parse(document.querySelector('#state').textContent);
const saved = {'application/vnd.jupyter.widget-state+json': state};
const silent = {connect: () => true, disconnect: () => true, emit() {}};
const own = {id: '', clientId: '', username: '', name: '', status: 'idle', isDisposed: false,
  registerCommTarget() {}, removeCommTarget() {}, registerMessageHook() {}, removeMessageHook() {}};
const kernel = new Proxy(own, {get: (target, name) => name in target ? target[name] : silent});
const loader = {
  widgetsRegisteredInRequireJs: new Set(),
  successHandler() {},
  errorHandler: (name, module) => { throw new Error(`cannot load ${module} ${name}`); },
  loadWidgetScript: name => Promise.reject(new Error(`offline: ${name}`)),
};
const node = document.querySelector('#output');
const manager = new window.vscIPyWidgets.WidgetManager(kernel, node, loader, () => {}, saved);
await manager.restoreWidgets({metadata: {get: () => saved}}, {loadKernel: false, loadNotebook: true});
const model = await manager.get_model(document.body.dataset.model);
model.comm_live = false;
const view = await manager.create_view(model, {el: node});
await manager.display_view({}, view, {node});
