/** The models that a request may name, as the server lists them. */

import { ApiError, get } from './api';
import { message } from './format';
import type { ModelCard, ModelList } from './types';

const AGAIN = 2000;

class Catalog {
  models = $state<ModelCard[]>([]);
  known = $state(false);
  /** A key is needed, and none or a wrong one was typed in. */
  locked = $state(false);
  problem = $state('');

  async refresh(): Promise<void> {
    try {
      this.models = (await get<ModelList>('v1/models')).data;
      this.known = true;
      this.locked = false;
      this.problem = '';
    } catch (error) {
      this.locked = error instanceof ApiError && error.status === 401;
      this.problem = this.locked ? '' : message(error);
      // A server that starts, or starts again, is asked until it answers.
      if (!this.locked) setTimeout(() => void this.refresh(), AGAIN);
    }
  }

  get writers(): ModelCard[] {
    return this.models.filter((model) => model.kind === 'text' || !model.kind);
  }

  find(id: string): ModelCard | undefined {
    return this.models.find((model) => model.id === id);
  }
}

export const catalog = new Catalog();

/** Whether a model's card says that it takes pictures. */
export function seesImages(model: ModelCard | undefined): boolean {
  return model?.input_modalities.includes('image') ?? false;
}
