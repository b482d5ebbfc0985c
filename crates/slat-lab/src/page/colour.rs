//! Which colours plots have. Each stands once here and once in `page.css`, which has its counterpart for dark pages.

use plotters::style::RGBColor;

pub(super) const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
pub(super) const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
pub(super) const FAINT: RGBColor = RGBColor(0x65, 0x6d, 0x76);
pub(super) const GRID: RGBColor = RGBColor(0xdf, 0xe3, 0xe8);

pub(super) const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
pub(super) const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
pub(super) const GREEN: RGBColor = RGBColor(0x00, 0x8f, 0x68);
pub(super) const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
pub(super) const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
pub(super) const PINK: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
pub(super) const YELLOW: RGBColor = RGBColor(0xe8, 0xdc, 0x3c);
pub(super) const STEEL: RGBColor = RGBColor(0x8a, 0x9b, 0xb0);
pub(super) const SILVER: RGBColor = RGBColor(0xc4, 0xcb, 0xd3);
