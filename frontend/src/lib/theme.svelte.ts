/** Light or dark: the system's choice until the person makes another. */

const NAME = 'mlx-manager-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

type Choice = 'system' | 'light' | 'dark';

class Theme {
  choice = $state<Choice>((localStorage.getItem(NAME) as Choice | null) ?? 'system');
  #dark = $state(system.matches);

  constructor() {
    system.addEventListener('change', (event) => {
      this.#dark = event.matches;
      this.apply();
    });
    this.apply();
  }

  get dark(): boolean {
    return this.choice === 'system' ? this.#dark : this.choice === 'dark';
  }

  toggle(): void {
    this.choice = this.dark ? 'light' : 'dark';
    localStorage.setItem(NAME, this.choice);
    this.apply();
  }

  private apply(): void {
    document.documentElement.dataset.theme = this.dark ? 'dark' : 'light';
  }
}

export const theme = new Theme();
