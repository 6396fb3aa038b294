/** Names for the types of our own API; `openapi.d.ts` is made from /openapi.json. */

import type { components } from './openapi';

type Schemas = components['schemas'];

export type ModelCard = Schemas['ModelCard'];
export type ModelList = Schemas['ModelList'];
export type AdminModel = Schemas['AdminModel'];
export type AdminModels = Schemas['AdminModels'];
export type AuditedCall = Schemas['AuditedCall'];
export type AuditedCalls = Schemas['AuditedCalls'];
export type RunningRequest = Schemas['RunningRequest'];
export type ChatRequest = Schemas['ChatCompletionRequest'];
export type ServerState = Schemas['ServerState'];
export type Sample = Schemas['Sample'];
export type RecentCall = Schemas['RecentCall'];
export type Download = Schemas['Download'];
export type FoundModel = Schemas['FoundModel'];
export type ModelPlan = Schemas['ModelPlan'];
export type ModelSettings = Schemas['ModelSettingsText'];
export type ChangedSettings = Schemas['ChangedSettings'];
