/** Numbers as people read them. */

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB'];

export function bytes(n: number): string {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${UNITS[unit]}`;
}

export function seconds(s: number): string {
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

export function count(n: number): string {
  return Math.round(n).toLocaleString('en');
}

export function rate(n: number): string {
  return n >= 100 ? count(n) : n.toFixed(1);
}

export function clock(unix: number): string {
  return new Date(unix * 1000).toLocaleTimeString([], {
    hour: '2-digit',
    minute: '2-digit',
    second: '2-digit',
  });
}

export function day(ms: number): string {
  const then = new Date(ms);
  const today = new Date();
  if (then.toDateString() === today.toDateString()) return 'Today';
  today.setDate(today.getDate() - 1);
  if (then.toDateString() === today.toDateString()) return 'Yesterday';
  return then.toLocaleDateString([], { day: 'numeric', month: 'long', year: 'numeric' });
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}
