(** * Defenses of local scores (core/receptive_fields.py, defenses/local_defense.py and its subclasses)

    Scores are integers: votes, or logits on a grid as fine as you like. Rounding is not part of these proofs. *)

From Coq Require Import List Bool Arith ZArith Lia.
From PatchCleanser Require Import Images.
Import ListNotations.
Local Open Scope Z_scope.

(** ** What a patch cannot reach (ReceptiveFields) *)

Section Reach.
  Context {pixel value score : Type}.
  Variable field : region pixel.
  Variable local_score : image pixel value -> score.
  Hypothesis sees_its_field_only : forall x x',
    (forall p, field p = true -> x p = x' p) -> local_score x = local_score x'.

  Theorem a_score_out_of_reach_is_unchanged : forall patch x x',
    (forall p, field p = true -> patch p = false) -> (forall p, patch p = false -> x' p = x p) ->
    local_score x' = local_score x.
  Proof. intros patch x x' Hapart Hsame. apply sees_its_field_only. auto. Qed.
End Reach.

(** A field of rows and columns meets a patch of rows and columns if and only if both axes meet. *)
Theorem reach_is_decided_by_axis : forall down across patch_rows patch_columns : nat -> bool,
  (exists p : nat * nat, (down (fst p) && across (snd p) = true) /\
    (patch_rows (fst p) && patch_columns (snd p) = true))
  <-> (exists r, down r = true /\ patch_rows r = true) /\ (exists c, across c = true /\ patch_columns c = true).
Proof.
  intros. split.
  - intros [[r c] [H H']]. apply andb_true_iff in H, H'. simpl in *. split; [exists r | exists c]; tauto.
  - intros [[r [H1 H2]] [c [H3 H4]]]. exists (r, c). simpl. now rewrite H1, H2, H3, H4.
Qed.

(** ** Sums over positions *)

Section Sums.
  Context {position : Type}.

  Definition sum (f : position -> Z) (l : list position) : Z := fold_right (fun p total => f p + total) 0 l.

  (** The sum over the positions that a patch reaches. *)
  Definition reached_sum (reach : position -> bool) (f : position -> Z) (l : list position) : Z :=
    sum (fun p => if reach p then f p else 0) l.

  Lemma sum_of_smaller_terms : forall f g l, (forall p, In p l -> f p <= g p) -> sum f l <= sum g l.
  Proof.
    intros f g l H. induction l as [|p l IH]; simpl; [lia|].
    specialize (IH (fun q Hq => H q (or_intror Hq))). specialize (H p (or_introl eq_refl)). lia.
  Qed.

  Lemma sum_plus : forall f g l, sum (fun p => f p + g p) l = sum f l + sum g l.
  Proof. intros. induction l as [|p l IH]; simpl; lia. Qed.

  Lemma sum_minus : forall f g l, sum (fun p => f p - g p) l = sum f l - sum g l.
  Proof. intros. induction l as [|p l IH]; simpl; lia. Qed.

  Lemma sum_of_equal_terms : forall f g l, (forall p, In p l -> f p = g p) -> sum f l = sum g l.
  Proof. intros. apply Z.le_antisymm; apply sum_of_smaller_terms; intros p Hp; rewrite H by assumption; lia. Qed.

  Lemma sum_of_terms_at_least_0 : forall f l, (forall p, In p l -> 0 <= f p) -> 0 <= sum f l.
  Proof.
    intros f l H. induction l as [|p l IH]; simpl; [lia|].
    specialize (IH (fun q Hq => H q (or_intror Hq))). specialize (H p (or_introl eq_refl)). lia.
  Qed.

  Definition union_of (reaches : list (position -> bool)) : position -> bool := fun p => existsb (fun r => r p) reaches.

  Lemma patches_together_reach_no_more_than_each : forall f reaches l, (forall p, In p l -> 0 <= f p) ->
    reached_sum (union_of reaches) f l <= fold_right (fun r total => reached_sum r f l + total) 0 reaches.
  Proof.
    intros f reaches l Hf. induction reaches as [|r reaches IH]; simpl.
    - unfold reached_sum, union_of. simpl. induction l; simpl; [lia|]. apply IHl. intros. apply Hf. now right.
    - apply Z.le_trans with (reached_sum r f l + reached_sum (union_of reaches) f l); [|lia].
      unfold reached_sum. rewrite <- sum_plus. apply sum_of_smaller_terms. intros p Hp. specialize (Hf p Hp).
      unfold union_of. simpl. destruct (r p), (existsb _ reaches); simpl; lia.
  Qed.

  (** A placement may be left out if another one reaches all of its scores. *)
  Lemma a_larger_reach_does_no_less : forall f reach reach' l, (forall p, In p l -> 0 <= f p) ->
    (forall p, reach p = true -> reach' p = true) -> reached_sum reach f l <= reached_sum reach' f l.
  Proof.
    intros f reach reach' l Hf Hwithin. apply sum_of_smaller_terms. intros p Hp. specialize (Hf p Hp).
    destruct (reach p) eqn:E; [rewrite (Hwithin p E); lia | destruct (reach' p); lia].
  Qed.
End Sums.

(** ** BagCert and Clipped BagNet (summed_margin)

    Votes lie in {0, 1} and squashed logits in [-1, 1], so a difference of two is never below -1 or -2: -drop. *)

Section SummedMargin.
  Context {position : Type}.
  Variable positions : list position.
  Variable drop : Z.

  (** The worst that a patch does to the lead of one class over another. *)
  Definition damage (lead : position -> Z) (reach : position -> bool) : Z :=
    reached_sum reach (fun p => lead p + drop) positions.

  Definition summed_margin (lead : position -> Z) (reaches : list (position -> bool)) : Z :=
    sum lead positions - fold_right (fun r total => damage lead r + total) 0 reaches.

  Theorem summed_margin_is_a_lower_bound : forall true_class rival true_class' rival' reaches,
    (forall p, - drop <= true_class p - rival p) -> (forall p, - drop <= true_class' p - rival' p) ->
    (forall p, union_of reaches p = false -> true_class' p = true_class p /\ rival' p = rival p) ->
    summed_margin (fun p => true_class p - rival p) reaches <= sum true_class' positions - sum rival' positions.
  Proof.
    intros y c y' c' reaches Hclean Hattacked Hsame. rewrite <- sum_minus. unfold summed_margin.
    assert (H : fold_right (fun r total => damage (fun p => y p - c p) r + total) 0 reaches >=
      reached_sum (union_of reaches) (fun p => y p - c p + drop) positions).
    { apply Z.le_ge, patches_together_reach_no_more_than_each. intros p _. specialize (Hclean p). lia. }
    enough (sum (fun p => y p - c p) positions - reached_sum (union_of reaches) (fun p => y p - c p + drop) positions
      <= sum (fun p => y' p - c' p) positions) by lia.
    unfold reached_sum. rewrite <- sum_minus. apply sum_of_smaller_terms. intros p _.
    destruct (union_of reaches p) eqn:E; [specialize (Hattacked p); lia|].
    destruct (Hsame p E) as [-> ->]. lia.
  Qed.

  (** The program takes the damage of one patch, and for each other the worst of any placement. *)
  Definition worst_damage (lead : position -> Z) (placements : list (position -> bool)) : Z :=
    fold_right (fun r worst => Z.max (damage lead r) worst) 0 placements.

  Definition margin_of_the_program
      (lead : position -> Z) (placements : list (position -> bool)) (others : nat) (reach : position -> bool) : Z :=
    sum lead positions - (damage lead reach + Z.of_nat others * worst_damage lead placements).

  Theorem several_patches_do_at_most_the_worst_each : forall lead placements reach others,
    incl others placements ->
    margin_of_the_program lead placements (length others) reach <= summed_margin lead (reach :: others).
  Proof.
    intros lead placements reach others Hincl. unfold margin_of_the_program, summed_margin. simpl.
    assert (H : forall r, In r placements -> damage lead r <= worst_damage lead placements).
    { clear. intros r Hr. unfold worst_damage. induction placements as [|v rest IH]; [destruct Hr|]. simpl.
      destruct Hr as [->|Hr]; [lia|]. specialize (IH Hr). lia. }
    enough (fold_right (fun r total => damage lead r + total) 0 others <=
      Z.of_nat (length others) * worst_damage lead placements) by lia.
    induction others as [|r others IH]; [simpl; lia|]. cbn [fold_right length].
    specialize (IH (fun q Hq => Hincl q (or_intror Hq))). specialize (H r (Hincl r (or_introl eq_refl))). lia.
  Qed.
End SummedMargin.

(** ** De-randomized smoothing: views vote *)

Section Smoothing.
  Context {view : Type}.
  Variable views : list view.

  (** Whether a view votes for a class. *)
  Definition ballot := nat -> view -> bool.

  Definition votes (b : ballot) (class : nat) : Z := sum (fun v => if b class v then 1 else 0) views.

  (** The most votes, of equals the smallest class. *)
  Definition wins (b : ballot) (y : nat) : Prop :=
    forall c, c <> y -> votes b c + (if (c <? y)%nat then 1 else 0) <= votes b y.

  Definition reached_views (reach : view -> bool) : Z := sum (fun v => if reach v then 1 else 0) views.

  (** What the certificate wants to be above 0 for each other class, if a patch reaches at most so many views. *)
  Definition smoothing_margin (b : ballot) (most : Z) (y c : nat) : Z :=
    votes b y - (votes b c + (if (c <? y)%nat then 1 else 0)) - 2 * most + 1.

  Theorem smoothing_keeps_the_label : forall b b' reach most y,
    (forall c v, reach v = false -> b' c v = b c v) ->
    reached_views reach <= most ->
    (forall c, c <> y -> 0 < smoothing_margin b most y c) ->
    wins b' y.
  Proof.
    intros b b' reach most y Hsame Hmost Hcert c Hc. specialize (Hcert c Hc). unfold smoothing_margin in Hcert.
    assert (H : forall d, votes b d - reached_views reach <= votes b' d <= votes b d + reached_views reach).
    { intro d. unfold votes, reached_views. rewrite <- sum_minus, <- sum_plus.
      split; apply sum_of_smaller_terms; intros v _; destruct (reach v) eqn:E;
        try (rewrite (Hsame d v E)); destruct (b d v), (b' d v); lia. }
    pose proof (H c). pose proof (H y). lia.
  Qed.

  (** Several patches reach at most so many views each. *)
  Theorem several_patches_reach_at_most_so_many_views_each : forall reaches most,
    (forall r, In r reaches -> reached_views r <= most) ->
    reached_views (union_of reaches) <= Z.of_nat (length reaches) * most.
  Proof.
    intros reaches most H. apply Z.le_trans with
      (fold_right (fun r total => reached_sum r (fun _ => 1) views + total) 0 reaches).
    - apply (patches_together_reach_no_more_than_each (fun _ => 1)). lia.
    - induction reaches as [|r reaches IH]; [simpl; lia|]. cbn [fold_right length].
      specialize (IH (fun q Hq => H q (or_intror Hq))). specialize (H r (or_introl eq_refl)).
      unfold reached_views in H. unfold reached_sum at 1. lia.
  Qed.
End Smoothing.

(** ** PatchGuard: the window with the most evidence is taken away *)

Section PatchGuard.
  Context {position : Type}.
  Variable positions : list position.
  Variable windows : list (position -> bool).

  (** A window goes if it holds more than num / den of the class's sum. *)
  Variables num den : Z.
  Hypothesis ratio_is_a_share : 0 <= num < den.

  Definition window_sum (w : position -> bool) (s : position -> Z) : Z := reached_sum w s positions.
  Definition outside (w : position -> bool) (s : position -> Z) : position -> Z := fun p => if w p then 0 else s p.

  Definition largest_window (s : position -> Z) : Z := fold_right (fun w most => Z.max (window_sum w s) most) 0 windows.

  Definition class_score (s : position -> Z) : Z :=
    let total := sum s positions in
    if num * total <? den * largest_window s then total - largest_window s else total.

  Lemma total_is_inside_and_outside : forall w s, sum s positions = window_sum w s + sum (outside w s) positions.
  Proof.
    intros w s. unfold window_sum, reached_sum, outside. rewrite <- sum_plus. apply sum_of_equal_terms.
    intros p _. destruct (w p); lia.
  Qed.

  Lemma no_window_holds_more : forall w s, In w windows -> window_sum w s <= largest_window s.
  Proof.
    intros w s Hw. unfold largest_window. induction windows as [|v rest IH]; [destruct Hw|]. simpl.
    destruct Hw as [->|Hw]; [lia|]. specialize (IH Hw). lia.
  Qed.

  Lemma largest_window_at_most : forall s bound, 0 <= bound ->
    (forall w, In w windows -> window_sum w s <= bound) -> largest_window s <= bound.
  Proof.
    intros s bound H0 H. unfold largest_window. induction windows as [|v rest IH]; simpl; [lia|].
    specialize (IH (fun w Hw => H w (or_intror Hw))). specialize (H v (or_introl eq_refl)). lia.
  Qed.

  (** The two halves of the proof: what is left of another class, and of the true one. *)
  Lemma what_is_left_of_a_rival : forall w s', In w windows -> (forall p, 0 <= s' p) ->
    class_score s' * (den - num) <= sum (outside w s') positions * den.
  Proof.
    intros w s' Hw Hpositive. unfold class_score.
    assert (Htotal := total_is_inside_and_outside w s'). assert (Hlargest := no_window_holds_more w s' Hw).
    assert (Houtside : 0 <= sum (outside w s') positions).
    { apply sum_of_terms_at_least_0. intros p _. unfold outside. destruct (w p); [lia|apply Hpositive]. }
    set (total := sum s' positions) in *. set (rest := sum (outside w s') positions) in *.
    destruct (Z.ltb_spec (num * total) (den * largest_window s')); nia.
  Qed.

  Lemma what_is_left_of_the_true_class : forall w s', (forall p, 0 <= s' p) ->
    sum (outside w s') positions - largest_window (outside w s') <= class_score s'.
  Proof.
    intros w s' Hpositive. unfold class_score.
    assert (Htotal := total_is_inside_and_outside w s').
    assert (Hinside : 0 <= window_sum w s').
    { apply sum_of_terms_at_least_0. intros p _. destruct (w p); [apply Hpositive | lia]. }
    assert (H0 : forall s, 0 <= largest_window s).
    { intro s. unfold largest_window. induction windows as [|v rest IH]; simpl; lia. }
    assert (Hlargest : largest_window s' <= largest_window (outside w s') + window_sum w s').
    { apply largest_window_at_most; [specialize (H0 (outside w s')); lia|]. intros v Hv.
      apply Z.le_trans with (window_sum v (outside w s') + window_sum w s').
      - unfold window_sum, reached_sum, outside. rewrite <- sum_plus. apply sum_of_smaller_terms. intros p _.
        specialize (Hpositive p). destruct (v p), (w p); lia.
      - pose proof (no_window_holds_more v (outside w s') Hv). lia. }
    specialize (H0 (outside w s')). destruct (num * _ <? _); lia.
  Qed.

  (** What the certificate wants to be above 0, for each window of a patch and each other class. *)
  Definition patchguard_margin (true_class rival : position -> Z) (w : position -> bool) : Z :=
    (sum (outside w true_class) positions - largest_window (outside w true_class)) * (den - num) -
    sum (outside w rival) positions * den.

  Theorem patchguard_keeps_the_label : forall true_class rival,
    (forall w, In w windows -> 0 < patchguard_margin true_class rival w) ->
    forall w true_class' rival', In w windows ->
      (forall p, 0 <= true_class' p) -> (forall p, 0 <= rival' p) ->
      (forall p, w p = false -> true_class' p = true_class p /\ rival' p = rival p) ->
      class_score rival' < class_score true_class'.
  Proof.
    intros y c Hcert w y' c' Hw Hy Hc Hsame. specialize (Hcert w Hw). unfold patchguard_margin in Hcert.
    assert (Hrival := what_is_left_of_a_rival w c' Hw Hc). assert (Htrue := what_is_left_of_the_true_class w y' Hy).
    assert (E : forall f g : position -> Z, (forall p, w p = false -> f p = g p) ->
      sum (outside w f) positions = sum (outside w g) positions /\
      largest_window (outside w f) = largest_window (outside w g)).
    { intros f g H. assert (Hp : forall p, outside w f p = outside w g p).
      { intro p. unfold outside. destruct (w p) eqn:Ew; auto. }
      split; [now apply sum_of_equal_terms|]. unfold largest_window. clear -Hp.
      induction windows as [|v rest IH]; simpl; [reflexivity|]. rewrite IH. f_equal.
      apply sum_of_equal_terms. intros p _. now rewrite Hp. }
    destruct (E c' c) as [Ec _]; [intros p Hp; now apply Hsame|].
    destruct (E y' y) as [Ey Ey']; [intros p Hp; now apply Hsame|].
    rewrite Ec in Hrival. rewrite Ey, Ey' in Htrue. nia.
  Qed.
End PatchGuard.
